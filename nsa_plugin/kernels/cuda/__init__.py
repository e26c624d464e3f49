"""The plugin's own CUDA kernels, compiled on the machine that uses them, at their first use."""
