"""DeepSeek-V3.2 attention and indexer under SGLang."""
