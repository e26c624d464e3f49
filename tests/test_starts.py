"""`nsa-plugin doctor` and `explain` against what the start of an engine does, by version and GPU."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
from packaging.version import Version

from nsa_plugin.commands import doctor, engines, starts
from nsa_plugin.errors import LeftToStockError, SettingsError
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.patches import static
from nsa_plugin.settings import Settings
from tests.doctor_kit import MODELS, enabling, run_doctor, shown, state_of

pytestmark = pytest.mark.usefixtures("plain_environment")

# Objects of vLLM that the start looks for, and the first version that has them.
VLLM_OBJECTS = {
    "vllm/utils/deep_gemm.py": {"0.33": "def mqa_logits_use_mx_scales(): ...\n"},
    "vllm/v1/attention/backends/registry.py": {
        "0.20": "class AttentionBackendEnum:\n    FLASHMLA_SPARSE = ''\n",
        "0.25": "    FLASH_ATTN_MLA_SPARSE = ''\n",
        "0.32": "    FLASHINFER_MLA_SPARSE_SM120 = ''\n",
    },
}


def with_version(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> engines.Engine:
    """An engine, as if this version of it were installed with all targets of the ledger."""

    def read(path: str) -> str | None:
        if path not in VLLM_OBJECTS:
            return None
        return "".join(text for first, text in VLLM_OBJECTS[path].items() if Version(version) >= Version(first))

    monkeypatch.setattr(engines.Engine, "installed", lambda self: (name, Version(version)))
    monkeypatch.setattr(engines.Engine, "not_loaded", lambda self: None)
    monkeypatch.setattr(engines.Engine, "targets_missing", lambda self, version, needs: [])
    monkeypatch.setattr(static, "installed", lambda package: static.SourceTree(read))
    return engines.ENGINES[name]


V32 = MODELS[:4]
NOT_GLM_FP8 = tuple(name for name in V32 if name != "GLM-5 fp8")
BF16 = ("V3.2 bf16", "GLM-5 bf16")
SPARSE, DSV4 = "--attention-backend FLASHMLA_SPARSE", "--attention-backend FLASHMLA_SPARSE_DSV4"
KV = ("--dsa-prefill-backend flashmla_kv", "--dsa-decode-backend flashmla_kv")


@pytest.mark.parametrize(
    ("engine", "version", "sm", "portable", "models", "words", "flags"),
    [
        ("vllm", "0.33.0", 100, "auto", (), "packs the scales of the indexer's cache as UE8M0 on SM100", ()),
        ("vllm", "0.32.0", 100, "auto", MODELS, f"GLM-5 fp8: may be left to vLLM unless {SPARSE} is given", (SPARSE,)),
        ("vllm", "0.30.0", 120, "auto", V32, "not V4 fp8: nsa-plugin's portable path for DeepSeek-V4 supports", ()),
        ("vllm", "0.33.0", 120, "auto", MODELS, f"V3.2 fp8, GLM-5 fp8: left to vLLM unless {SPARSE} is", (SPARSE,)),
        ("vllm", "0.33.0", 120, "auto", MODELS, f"V4 fp8: left to vLLM unless {DSV4} is given", (SPARSE,)),
        ("vllm", "0.33.0", 120, "on", MODELS, f"V4 fp8: left to vLLM unless {DSV4} is given", (DSV4,)),
        ("vllm", "0.24.0", 90, "auto", MODELS, "ready", ()),
        (
            "vllm",
            "0.33.0",
            90,
            "auto",
            MODELS,
            f"GLM-5 bf16: may be left to vLLM, by its heads a rank, unless {SPARSE}",
            (),
        ),
        ("sglang", "0.5.23", 120, "auto", NOT_GLM_FP8, "SGLang serves GLM-5 over an fp8 cache on SM120", ()),
        ("sglang", "0.5.23", 120, "on", NOT_GLM_FP8, "SGLang serves GLM-5 over an fp8 cache on SM120", ()),
        ("sglang", "0.5.22", 120, "auto", (), "portable path on SM120 supports SGLang >=0.5.23,<0.5.24; this is", ()),
        ("sglang", "0.5.23", 110, "auto", (), "SM90, SM100 and SM120 GPUs, and this one is SM110", ()),
        ("sglang", "0.5.23", 100, "auto", MODELS, f"GLM-5 fp8: left to SGLang unless {KV[0]} and {KV[1]} are", KV),
        ("sglang", "0.5.23", 90, "auto", MODELS, "ready", ()),
        ("vllm", "0.32.0", 0, "auto", BF16, "a CPU serves DeepSeek-V3.2 and GLM-5 with a bf16 cache only", ()),
        ("vllm", "0.32.0", 0, "on", (), "portable is on and cannot work here: a CPU cannot emulate SM86", ()),
        ("vllm", "0.33.0", 80, "on", (), "portable is on and cannot work here: SM80 cannot emulate SM86", ()),
        ("vllm", "0.27.0", 90, "on", (), "nsa-plugin's portable path supports vLLM >=0.28,<0.34; this is 0.27.0", ()),
        ("vllm", "0.33.0", 90, "on", MODELS, "ready", ()),
        ("vllm", "0.32.0", 90, "on", V32, "portable path for DeepSeek-V4 supports vLLM >=0.33,<0.34; this is", ()),
        ("sglang", "0.5.15", 90, "on", (), "portable is on and cannot work with SGLang 0.5.15", ()),
        ("sglang", "0.5.23", 90, "on", V32, "not V4 fp8: portable is on and cannot work here: DeepSeek-V4 needs", ()),
    ],
)
def test_doctor_says_what_the_start_does(
    engine: str,
    version: str,
    sm: int,
    portable: str,
    models: tuple[str, ...],
    words: str,
    flags: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NSA_PLUGIN_PORTABLE", portable)
    monkeypatch.setattr(doctor, "probe", lambda: synthetic(sm))
    known = {engine: with_version(monkeypatch, engine, version)}
    code, out, _ = run_doctor(monkeypatch, capsys, "doctor", **known)
    said = " ".join(out.split())
    assert words in said
    assert code == (0 if models else 1)
    assert ("\nok:" in out) == bool(models)
    enable = enabling(out) if models else ""
    assert [flag for flag in (SPARSE, DSV4, *KV) if f"{flag} " in f"{enable}\n".replace("\n", " ")] == list(flags)
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 80
    _, out, _ = run_doctor(monkeypatch, capsys, "doctor --json", **known)
    (state,) = json.loads(out)["engines"]
    assert state["models"] == list(models)
    for model in state["unless"]:
        assert f"serves {model}" not in said
        assert f"can serve {model}" not in said
    if portable == "on":
        assert ("emulating SM86" in said) == (sm >= 90)
        assert not models or {row["provider"] for row in json.loads(out)["routes"]} <= {"cuda", "triton"}
    # The portable path is the only reason, so without it the engine serves.
    refused_by_setting = portable == "on" and not models
    assert (state["fix"] == "unset NSA_PLUGIN_PORTABLE") == refused_by_setting
    if refused_by_setting:
        monkeypatch.delenv("NSA_PLUGIN_PORTABLE")
        assert run_doctor(monkeypatch, capsys, "doctor", **known)[0] == 0


@pytest.mark.parametrize("portable", ["auto", "on"])
@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100, 120])
def test_decisions_are_made_for_the_device_that_the_backends_use(
    sm: int, portable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa_plugin.backends.common.providers import device_in_use
    from nsa_plugin.kernels.triton import device

    monkeypatch.setattr(device, "emulate", lambda sm: None)
    settings = Settings(portable=portable)
    try:
        wanted = device_in_use(synthetic(sm), settings)
    except SettingsError:
        with pytest.raises(SettingsError, match="portable is on and cannot work here"):
            starts.in_use(synthetic(sm), settings)
    else:
        assert starts.in_use(synthetic(sm), settings) == wanted


def test_doctor_shows_conditions_of_two_engines_on_one_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = []
    for engine, version in (("vllm", "0.32.0"), ("sglang", "0.5.23")):
        states.append(state_of(with_version(monkeypatch, engine, version), synthetic(100)))
    out = shown(monkeypatch, capsys, *states)
    assert len(out.splitlines()) <= 24
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.32.0"), ("vllm", "0.33.0"), ("sglang", "0.5.23")])
@pytest.mark.parametrize("sm", [0, 80, 90, 100, 120])
def test_doctor_names_glm_5_wherever_it_names_v32(
    engine: str, version: str, sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(with_version(monkeypatch, engine, version), synthetic(sm))
    for layout in ("bf16", "fp8"):
        v32, glm = (f"{name} {layout}" for name in ("V3.2", "GLM-5"))
        if (engine, sm, layout) == ("sglang", 120, "fp8"):
            assert (v32 in state.models, state.refused[glm]) == (True, starts.GLM_FP8_ON_SM120)
            continue
        assert (v32 in state.models) == (glm in state.models)
        assert (state.refused.get(v32), state.unless.get(v32)) == (state.refused.get(glm), state.unless.get(glm))


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_packed_scales_are_left_in_the_words_of_the_start(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_plugin.backends.vllm.v32.choice import check_device

    vllm = with_version(monkeypatch, "vllm", version)
    module = ModuleType("vllm.utils.deep_gemm")
    if version == "0.33.0":
        module.mqa_logits_use_mx_scales = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    utils = ModuleType("vllm.utils")
    utils.deep_gemm = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.utils", utils)
    monkeypatch.setitem(sys.modules, "vllm.utils.deep_gemm", module)
    try:
        check_device(synthetic(100))
        wanted = None
    except LeftToStockError as error:
        wanted = starts.NotServed(str(error))
    assert (wanted is None) == (version == "0.32.0")
    for model in doctor._MODELS.values():
        assert starts.refusal(vllm, Version(version), model, synthetic(100), Settings()) == wanted
