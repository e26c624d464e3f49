"""The Triton window kernel against the reference, entry by entry."""

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.triton import swa_indices as kernels

from . import index_cases as cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("requests", "window", "padding"), [(4, 3, 2), (1, 1, 0), (0, 4, 3), (9, 16, 0), (33, 5, 1), (0, 2, 0)]
)
def test_window(seed, requests, window, padding):
    cases.check_window(seed, requests, window, padding, DEVICE)


def test_a_window_wider_than_a_program(monkeypatch):
    monkeypatch.setattr(kernels, "MAX_BLOCK", 8)
    cases.check_window(3, 5, 30, 2, DEVICE)


def test_what_the_reference_refuses_has_no_index_on_the_device():
    def int32(*values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    # Three queries of a context of one token: only the last one has a position.
    few = kernels.window(int32(0, 3), int32(1), 2, num_tokens=3)
    assert few.lengths.tolist() == [0, 0, 1]
    assert few.indices.tolist() == [[-1, -1], [-1, -1], [0, -1]]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.window(int32(0, 2), int32(2, 2), 3, num_tokens=2), "seq_lens has shape"),
        (lambda: kernels.window(int32(), int32(), 3, num_tokens=2), "cu_seqlens_q is empty"),
        (lambda: kernels.window(int32(0, 2), int32(2), 0, num_tokens=2), "window is 0"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call()
