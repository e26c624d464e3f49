"""Shared kernels, one op a file: its contract, its float32 reference, and the providers.

`registry` names the ops and their providers and imports no torch; every other module here does.
"""
