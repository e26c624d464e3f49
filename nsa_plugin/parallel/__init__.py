"""Work of an attention layer dealt out over the ranks of a tensor-parallel group. Knows no engine."""
