"""One adapter an engine: engine batch -> BatchShape -> decide -> kernels -> engine tensors."""
