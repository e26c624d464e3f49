"""The Triton index transforms against the reference, entry by entry."""

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.triton import index_transform as kernels

from . import index_cases as cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("rows", "topk", "requests", "pages", "page_size"),
    [(5, 9, 3, 4, 64), (1, 1, 1, 1, 1), (3, 130, 2, 40, 1), (0, 4, 2, 3, 2), (4, 0, 2, 3, 2), (2, 3, 0, 0, 4)],
)
def test_paged(seed, rows, topk, requests, pages, page_size):
    if requests == 0 and rows:
        seed = 3 * seed  # the expanded form: one table row a query row, here without a page
    cases.check_paged(seed, rows, topk, requests, pages, page_size, DEVICE)


def test_rows_wider_than_a_program(monkeypatch):
    monkeypatch.setattr(kernels, "MAX_BLOCK", 16)
    cases.check_paged(1, 3, 50, 2, 9, 2, DEVICE)
    cases.check_ragged(1, 3, 50, DEVICE)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("rows", "topk"), [(5, 9), (1, 1), (0, 3), (3, 0), (3, 130)])
def test_ragged(seed, rows, topk):
    cases.check_ragged(seed, rows, topk, DEVICE)


@pytest.mark.regression(15)
def test_a_large_int64_table_does_not_wrap():
    pages = torch.tensor([[2**31 // 64 - 1]], device=DEVICE)
    position = torch.tensor([[63]], device=DEVICE)
    assert kernels.paged(position, pages, page_size=64).item() == 2**31 - 1


TOPK, TABLE = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.paged(TOPK[0], TABLE, page_size=1), "topk_indices has shape"),
        (lambda: kernels.paged(TOPK.float(), TABLE, page_size=1), "topk_indices has dtype float32"),
        (lambda: kernels.paged(TOPK, TABLE[0], page_size=1), "page_table has shape"),
        (lambda: kernels.paged(TOPK, TABLE, page_size=0), "page_size is 0"),
        (lambda: kernels.paged(TOPK, TABLE, page_size=1), "page_table has 2 rows for 3 rows"),
        (lambda: kernels.paged(TOPK, TABLE, page_size=1, row_to_request=TABLE[0]), "row_to_request has"),
        (lambda: kernels.paged(TOPK[:2], TABLE, page_size=1, lengths=torch.zeros(2)), "lengths has dtype"),
        (lambda: kernels.paged(TOPK[:2], TABLE, page_size=1, out=TOPK), r"out has shape \[3, 4\]"),
        (lambda: kernels.paged(TOPK[:2], TABLE, page_size=1, out=TOPK.new_zeros(4, 2).t()), "out has strides"),
        (lambda: kernels.ragged(TOPK, torch.zeros(2, dtype=torch.int32)), "offsets has shape"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(KernelArgumentError, match=message):
        call()
