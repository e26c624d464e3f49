"""Small checkpoints with seeded random weights, made locally: DeepSeek-V3.2 and DeepSeek-V4."""
