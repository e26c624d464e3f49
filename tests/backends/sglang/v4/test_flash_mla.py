"""The installed SGLang's FlashMLA behind the contract of attention over bfloat16 rows."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from nsa_plugin.backends.sglang.v4 import flash_mla as v4_flash_mla
from nsa_plugin.errors import NoProviderError
from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.sparse_mla import reference_prefill


def installed(monkeypatch: pytest.MonkeyPatch, name: str) -> list[dict[str, Any]]:
    """A module that has the function as SGLang calls it, and the arguments of each call."""
    calls: list[dict[str, Any]] = []

    def flash_mla_sparse_fwd(
        *, q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int, attn_sink: Any, topk_length: Any
    ) -> Any:
        calls.append({"q": q, "kv": kv, "indices": indices, "attn_sink": attn_sink})
        assert q.shape[1] in (64, 128)
        assert q.is_contiguous()
        return reference_prefill(q, kv, indices, scale=sm_scale, d_v=d_v, topk_length=topk_length, attn_sink=attn_sink)

    at, parts = "", name.split(".")
    for part in parts:
        at = f"{at}.{part}" if at else part
        module = ModuleType(at)
        module.__path__ = []
        module.__spec__ = ModuleSpec(at, None, is_package=True)
        monkeypatch.setitem(sys.modules, at, module)
    module.flash_mla_sparse_fwd = flash_mla_sparse_fwd
    monkeypatch.setattr(v4_flash_mla, "MODULES", ("no_such_package.flash_mla", "no_such_module", name))
    v4_flash_mla._sparse_fwd.cache_clear()
    return calls


@pytest.fixture(autouse=True)
def _forgotten() -> Any:
    yield
    v4_flash_mla._sparse_fwd.cache_clear()


@pytest.mark.parametrize("heads", [1, 63, 64, 65, 128])
@pytest.mark.parametrize("given_out", [True, False])
def test_heads_are_padded_to_a_supported_count(heads: int, given_out: bool, monkeypatch: pytest.MonkeyPatch):
    calls = installed(monkeypatch, "fake_kernel.flash_mla")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, heads, 512, generator=generator).bfloat16()
    kv = torch.randn(20, 512, generator=generator).bfloat16()
    indices = torch.randint(-1, 20, (3, 128), generator=generator, dtype=torch.int32)
    given: dict[str, Any] = {
        "scale": 0.05,
        "topk_length": torch.tensor([5, 128, 0], dtype=torch.int32),
        "attn_sink": torch.randn(heads, generator=generator),
    }
    out = torch.empty(3, heads, 512, dtype=torch.bfloat16) if given_out else None
    got = v4_flash_mla.sparse_prefill(q, kv, indices, out=out, **given)
    expected = reference_prefill(q, kv, indices, **given)
    assert calls[0]["kv"].shape == (20, 1, 512)
    assert calls[0]["indices"].shape == (3, 1, 128)
    assert out is None or got.out is out
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_more_heads_than_the_kernel_takes():
    with pytest.raises(KernelArgumentError, match="q has 129 heads"):
        v4_flash_mla.sparse_prefill(
            torch.zeros(1, 129, 512), torch.zeros(1, 512), torch.zeros(1, 128, dtype=torch.int32), scale=1.0
        )


def test_a_flash_mla_without_sinks_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    def older(q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int = 512) -> None: ...

    installed(monkeypatch, "older_kernel.flash_mla")
    monkeypatch.setattr(sys.modules["older_kernel.flash_mla"], "flash_mla_sparse_fwd", older)
    monkeypatch.setattr(v4_flash_mla, "MODULES", ("older_kernel.flash_mla",))
    with pytest.raises(NoProviderError, match=r"of older_kernel\.flash_mla it takes no attn_sink and no topk_length"):
        v4_flash_mla._sparse_fwd()
    installed(monkeypatch, "fake_kernel.flash_mla")
    monkeypatch.setattr(v4_flash_mla, "MODULES", ("older_kernel.flash_mla", "fake_kernel.flash_mla"))
    assert v4_flash_mla._sparse_fwd() is sys.modules["fake_kernel.flash_mla"].flash_mla_sparse_fwd  # type: ignore[attr-defined]


def test_of_a_flash_mla_with_two_sides_hoppers_is_taken(monkeypatch: pytest.MonkeyPatch):
    sides = []

    def both(
        q: Any, kv: Any, indices: Any, sm_scale: float, attn_sink: Any, topk_length: Any, use_legacy: bool = False
    ):
        sides.append(use_legacy)

    installed(monkeypatch, "fake_kernel.flash_mla")
    monkeypatch.setattr(sys.modules["fake_kernel.flash_mla"], "flash_mla_sparse_fwd", both)
    v4_flash_mla._sparse_fwd()(q=0, kv=0, indices=0, sm_scale=1.0, attn_sink=None, topk_length=None)
    assert sides == [True]


def test_no_flash_mla_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(v4_flash_mla, "MODULES", ("no_such_package.flash_mla", "no_such_module"))
    v4_flash_mla._sparse_fwd.cache_clear()
    with pytest.raises(NoProviderError, match="no_such_module"):
        v4_flash_mla._sparse_fwd()
