"""Kernel libraries: what each one provides, on which devices, and within which limits."""
