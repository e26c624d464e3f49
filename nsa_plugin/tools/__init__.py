"""Developer and user tools: kernel benchmarks and engine comparisons."""
