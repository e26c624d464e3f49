"""The mark of tests of kernels that are compiled for SM90 alone."""

import pytest
import torch

needs_sm90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU with SM90"
)
