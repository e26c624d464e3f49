"""Start-up under vLLM: activation, verification of the patches, counters."""
