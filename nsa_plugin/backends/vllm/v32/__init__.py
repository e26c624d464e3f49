"""DeepSeek-V3.2 attention and indexer under vLLM on a GPU."""
