"""Triton kernels run interpreted where there is no GPU; it has to be said before any of them is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
