"""Kernel libraries behind the contracts of `nsa_plugin.kernels`; each is imported when it is called."""
