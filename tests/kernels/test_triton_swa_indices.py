"""The Triton window and combine kernels against the reference, entry by entry."""

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.swa_indices import IndexRows
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
    cases.check_combine(3, 4, 9, 20, 8, DEVICE)


def test_what_the_reference_refuses_has_no_index_on_the_device():
    def int32(*values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    # Three queries of a context of one token: only the last one has a position.
    few = kernels.window(int32(0, 3), int32(1), 2, num_tokens=3)
    assert few.lengths.tolist() == [0, 0, 1]
    assert few.indices.tolist() == [[-1, -1], [-1, -1], [0, -1]]
    # The window of position 8 is 5 to 8; a buffer of 3 tokens, at row 20, starts with token 6.
    held = kernels.window(int32(0, 1), int32(9), 4, num_tokens=1, bases=int32(20), gather_lens=int32(3))
    assert held.indices.tolist() == [[-1, 20, 21, 22]]
    assert held.lengths.tolist() == [4]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("tokens", "width", "extra_width", "alignment"),
    [(5, 7, 11, 128), (3, 1, 0, 1), (4, 0, 6, 8), (2, 0, 0, 64), (0, 3, 4, 8), (3, 130, 70, 1)],
)
def test_combine(seed, tokens, width, extra_width, alignment):
    cases.check_combine(seed, tokens, width, extra_width, alignment, DEVICE)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


ROWS = IndexRows(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.window(int32(0, 2), int32(2, 2), 3, num_tokens=2), "seq_lens has shape"),
        (lambda: kernels.window(int32(), int32(), 3, num_tokens=2), "cu_seqlens_q is empty"),
        (lambda: kernels.window(int32(0, 2), int32(2), 0, num_tokens=2), "window is 0"),
        (lambda: kernels.window(int32(0, 1), int32(9), 4, num_tokens=1, bases=int32(0)), "go together"),
        (
            lambda: kernels.window(int32(0, 1), int32(9), 4, num_tokens=1, bases=int32(0), gather_lens=int32(1, 2)),
            "gather_lens has shape",
        ),
        (lambda: kernels.combine(ROWS, IndexRows(ROWS.indices[:1], ROWS.lengths), extra_offset=0), "extra.indices"),
        (lambda: kernels.combine(IndexRows(ROWS.indices, ROWS.lengths[:1]), ROWS, extra_offset=0), "swa.lengths"),
        (lambda: kernels.combine(ROWS, ROWS, extra_offset=0, alignment=0), "alignment is 0"),
        (lambda: kernels.combine(ROWS, ROWS, extra_offset=0, out=torch.zeros(2, 6)), "out has shape"),
        (lambda: kernels.combine(ROWS, ROWS, extra_offset=int32(1, 2, 3)), "extra_offset has shape"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call()
