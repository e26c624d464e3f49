"""A kernel library is added with a provider module and one manifest entry, and with nothing else.

This file is also the example for contributors: `PROVIDER` is the module and `TOY` the entry.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci import docs
from nsa_plugin import cli
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.plan import Attention
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.errors import NoProviderError, SettingsError
from nsa_plugin.libraries.capabilities import LATEST_SM, V32_ROW, Capability, HostModule, KernelLibrary, Op
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.libraries.manifest import MANIFEST
from nsa_plugin.libraries.probe import probe
from nsa_plugin.libraries.registry import Registry
from nsa_plugin.settings import Settings, backends, resolve
from nsa_plugin.tools import records

PROVIDER = '''
"""Toy kernels behind the contract of sparse MLA decode."""
import toy_kernels

def decode(*args, **kwargs):
    return "decoded by toy"
'''

TOY = KernelLibrary(
    name="toy",
    hosts=(HostModule(module="toy_kernels", distributions=("toy-kernels",)),),
    targets={"sparse_mla_decode": "toy_provider:decode"},
    requires=("toy_kernels",),
    assumed=("toy-kernels", "1.0"),
    kernels=(
        Capability(
            op=Op.SPARSE_MLA_DECODE,
            layouts=("bf16",),
            sm_min=0,
            sm_max=LATEST_SM,
            head_counts=(16, 32),
            topk_multiple=64,
            dims=(V32_ROW,),
            source="this test",
        ),
    ),
)

MODEL = ModelShape(num_heads=128, attn_tp_size=4)
DECODE = BatchShape(phase=Phase.DECODE, num_requests=4, num_tokens=4, max_kv_len=8192, total_kv_len=32768)


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the toy library and its provider module, and add the entry to the manifest."""
    (tmp_path / "toy_kernels.py").write_text("")
    (tmp_path / "toy_provider.py").write_text(PROVIDER)
    info = tmp_path / "toy_kernels-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-kernels\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setitem(MANIFEST, TOY.name, TOY)
    probe.cache_clear()
    yield
    probe.cache_clear()
    for module in ("toy_kernels", "toy_provider"):
        sys.modules.pop(module, None)


def test_the_registry_loads_it() -> None:
    assert [provider.name for provider in Registry().providers("sparse_mla_decode")][-1] == "toy"
    assert Registry().load("sparse_mla_decode", "toy")() == "decoded by toy"
    with pytest.raises(NoProviderError, match="no provider 'toy'"):
        Registry().load("sparse_mla_prefill", "toy")


def test_the_probed_profile_lists_the_installed_build() -> None:
    library = probe().libraries["toy"]
    assert (library.available, library.distribution, library.version) == (True, "toy-kernels", "1.2")
    assert [kernel.source for kernel in library.capabilities] == ["this test"]


def test_a_synthetic_profile_lists_it() -> None:
    assert synthetic(90).has("toy", Op.SPARSE_MLA_DECODE, "bf16")
    assert not synthetic(90).has("toy", Op.SPARSE_MLA_DECODE, "v32_fp8")
    assert not synthetic(90, libraries=("fa3",)).has("toy", Op.SPARSE_MLA_DECODE)


def test_a_setting_accepts_its_name_where_it_has_the_kernel() -> None:
    assert backends("decode_backend")[-1] == "toy"
    assert resolve(environ={"NSA_PLUGIN_DECODE_BACKEND": "toy"}).settings.decode_backend == "toy"
    assert "toy" in Settings.allowed("decode_backend")
    with pytest.raises(SettingsError, match=r"'prefill_backend'.*'toy'"):
        resolve(environ={"NSA_PLUGIN_PREFILL_BACKEND": "toy"})


def test_a_decision_picks_it_when_asked() -> None:
    plan = decide(MODEL, DECODE, synthetic(90), Settings(decode_backend="toy"))
    assert (plan.attention, plan.provider) == (Attention.SPARSE_DECODE, "toy")


def test_a_decision_picks_it_without_being_asked_only_if_no_ranked_kernel_supports_the_batch() -> None:
    assert decide(MODEL, DECODE, synthetic(90), Settings()).provider == "cuda"
    assert decide(MODEL, DECODE, synthetic(90, libraries=("toy", "deep_gemm")), Settings()).provider == "toy"


def test_a_batch_beyond_its_limits_is_refused_with_the_limit() -> None:
    with pytest.raises(SettingsError, match=r"decode_backend is toy, .* 16 or 32 heads; there are 128"):
        decide(ModelShape(num_heads=128), DECODE, synthetic(90), Settings(decode_backend="toy"))


def test_a_record_names_the_installed_build() -> None:
    assert records.software(commit="none")["libraries"]["toy-kernels"] == "1.2"


def test_the_docs_and_doctor_show_it(capsys: pytest.CaptureFixture[str]) -> None:
    table = docs.kernels_table()
    assert "| `sparse_mla_decode` | toy | any device | bf16 | 16 or 32 | multiples of 64 |" in table
    assert "| toy | `toy_kernels` from toy-kernels | `decode_backend` | `toy_kernels` |" in table
    cli.main(["doctor", "--json"])
    library = json.loads(capsys.readouterr().out)["device"]["libraries"]["toy"]
    assert (library["available"], library["version"]) == (True, "1.2")
    cli.main(["doctor", "-v"])
    assert "toy-kernels 1.2" in capsys.readouterr().out
