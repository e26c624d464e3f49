"""Start-up under SGLang: flags, hooks, verification of the patches, metrics."""
