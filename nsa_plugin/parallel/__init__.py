"""An attention layer's work, resharded over the ranks of a tensor-parallel group. Knows no engine."""
