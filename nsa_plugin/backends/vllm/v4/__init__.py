"""DeepSeek-V4 attention and indexer under vLLM."""
