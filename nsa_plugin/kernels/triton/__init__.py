"""The plugin's portable kernels, in Triton: the contracts of the modules of the same names one level up."""
