"""What the start of an engine does with a model: serve it, leave it to the stock engine, or refuse it.

The rules are those of the backends, called where that takes neither an engine nor a GPU. A default that the engine
chooses at its start is stated as a condition, with the flag that overrides it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from packaging.version import Version

from nsa_plugin.backends.sglang.startup import activation as sglang_start
from nsa_plugin.backends.sglang.startup import model as sglang_model
from nsa_plugin.backends.vllm.startup import activation as vllm_start
from nsa_plugin.backends.vllm.startup import model as vllm_model
from nsa_plugin.commands.engines import Engine
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.errors import LeftToStockError, NsaPluginError, SettingsError
from nsa_plugin.libraries.architectures import EMULATED, is_sm120
from nsa_plugin.libraries.devices import DeviceProfile, emulating
from nsa_plugin.patches import sglang as sglang_ledger
from nsa_plugin.patches import static
from nsa_plugin.patches import vllm as vllm_ledger
from nsa_plugin.patches.ledger import Kind, Need, Target
from nsa_plugin.settings import ResolvedSettings, Settings

DSA_FLAGS = Version("0.5.13")
"""The SGLang from which on its flags for sparse attention begin with --dsa, before with --nsa."""

GLM_V_HEAD_DIM = 256
GLM_FP8_ON_SM120 = "SGLang serves GLM-5 over an fp8 cache on SM120 with FlashInfer's kernels"


@dataclass(frozen=True)
class NotServed:
    """Why the plugin does not serve a model.

    Attributes:
        setting: the setting without which it would; "" if there is none.
    """

    reason: str
    setting: str = ""


@dataclass(frozen=True)
class Condition:
    """When the plugin serves a model only with a flag of the engine, or only in part.

    Attributes:
        text: what happens without the flag.
        flags: what the engine's command needs, one string for each line; () where the flag may not be worth it.
    """

    text: str
    flags: tuple[str, ...] = ()


def in_use(device: DeviceProfile, settings: Settings) -> DeviceProfile:
    """The profile that decisions are made for, as `device_in_use` of the backends; with `portable` on an older GPU's.

    Unlike that function this does not make the kernels of the process emulate the GPU, and needs no torch.

    Raises:
        SettingsError: `portable` is on and cannot work on the device.
    """
    if settings.portable != "on" or device.kind == "unknown":
        return device
    try:
        return emulating(device, EMULATED)
    except ValueError as error:
        raise SettingsError(f"portable is on and cannot work here: {error}; allowed here: auto") from None


def not_here(engine: Engine, device: DeviceProfile, settings: Settings) -> NotServed | None:
    """Why an engine's start leaves every model on a device, or None."""
    if engine.name == sglang_ledger.ENGINE and device.kind == "cuda":
        try:
            sglang_model.check_gpu(device.sm, ResolvedSettings(settings, {}))
        except NsaPluginError as error:
            return NotServed(str(error))
    reason = engine.not_on(device)
    return NotServed(reason) if reason else None


def refusal(
    engine: Engine, version: Version, model: ModelShape, device: DeviceProfile, settings: Settings
) -> NotServed | None:
    """Why an engine's start does not serve a model on a device, which `not_here` does not leave; None if it does."""
    try:
        _check(engine, version, model, device, settings)
    except NsaPluginError as error:
        if settings.portable == "on":
            without = refusal(engine, version, model, device, replace(settings, portable="auto"))
            return without or NotServed(str(error), "portable")
        return NotServed(str(error))
    return None


def _check(engine: Engine, version: Version, model: ModelShape, device: DeviceProfile, settings: Settings) -> None:
    """Raise what the start raises."""
    gpu, forced = device.kind == "cuda", settings.portable == "on"
    # An emulated GPU has the engine's kernels of the real one.
    if (reason := engine.not_for(model, device)) and not (gpu and forced):
        raise LeftToStockError(reason)
    used = in_use(device, settings)
    if engine.name == vllm_ledger.ENGINE and gpu:
        _check_vllm(version, model, device, used, forced=forced)
    elif engine.name == sglang_ledger.ENGINE and gpu:
        _check_sglang(version, model, device, forced=forced)


def _check_vllm(
    version: Version, model: ModelShape, device: DeviceProfile, used: DeviceProfile, *, forced: bool
) -> None:
    """As `check_here` of vLLM's start and `check` of its workers."""
    from nsa_plugin.backends.vllm.v32.choice import check_device  # imports torch

    v4 = model.family == "v4"
    if forced or vllm_model.is_portable(device.sm):
        vllm_start.check_portable_version(version, v4=v4)
    if used.sm // 10 != 10:
        check_device(used)
    elif _vllm_has("vllm.utils.deep_gemm:mqa_logits_use_mx_scales"):
        # `check_device` looks the name up in the imported vLLM.
        raise LeftToStockError(
            f"this vLLM packs the scales of the indexer's cache as UE8M0 on {used.where}; nsa-plugin reads float32"
        )


def _check_sglang(version: Version, model: ModelShape, device: DeviceProfile, *, forced: bool) -> None:
    """As the checks of SGLang's start."""
    if forced or sglang_model.is_portable(device.sm):
        sglang_start.check_portable_version(version, device.sm, forced=forced)
    if is_sm120(device.sm) and (model.v_head_dim, model.kv_layout) == (GLM_V_HEAD_DIM, "v32_fp8"):
        raise LeftToStockError(GLM_FP8_ON_SM120)
    if forced and model.family == "v4":
        raise SettingsError(f"portable is on and cannot work here: {sglang_start.NO_PORTABLE_V4}; allowed here: auto")


def condition(
    engine: Engine, version: Version, model: ModelShape, device: DeviceProfile, settings: Settings
) -> Condition | None:
    """On which flag it depends whether an engine's start serves a model that `refusal` does not refuse, or None."""
    if device.kind != "cuda":
        return None
    if engine.name == vllm_ledger.ENGINE:
        return _vllm_condition(model, device, settings)
    return _sglang_condition(version, model, device, settings) if engine.name == sglang_ledger.ENGINE else None


def _vllm_condition(model: ModelShape, device: DeviceProfile, settings: Settings) -> Condition | None:
    """As `prepare` of vLLM's workers, which choose the attention backend or leave the choice to vLLM."""
    from nsa_plugin.backends.vllm.v4.serving import BACKENDS as V4_BACKENDS  # imports torch
    from nsa_plugin.backends.vllm.v32 import choice

    v4 = model.family == "v4"
    flag = f"--attention-backend {V4_BACKENDS[0] if v4 else choice.BACKEND}"
    left = Condition(f"left to vLLM unless {flag} is given", (flag,))
    if v4:
        # Its layers choose by the real GPU: on SM120 FlashInfer's kernels.
        return left if is_sm120(device.sm) else None
    used = in_use(device, settings)
    if vllm_model.is_portable(used.sm):
        chosen = (model.kv_layout, model.index_topk) == ("v32_fp8", choice.SM120_TOPK)
        sm120 = is_sm120(used.sm) and _vllm_has_backend(choice.SM120_BACKEND)
        return left if chosen and sm120 else None
    if used.sm not in choice.BACKEND_SMS:
        return Condition(f"may be left to vLLM unless {flag} is given (V4 needs none)", (flag,))
    by_setting = {settings.prefill_backend, settings.decode_backend} != {"auto"}
    if model.kv_layout == "bf16" and not by_setting and _vllm_has_backend(choice.BF16_BACKEND):
        # `kept_choice` knows the heads of a rank. No flag in the command: vLLM's choice may be the faster one.
        return Condition(f"may be left to vLLM, by its heads a rank, unless {flag} is given")
    return None


def _sglang_condition(
    version: Version, model: ModelShape, device: DeviceProfile, settings: Settings
) -> Condition | None:
    """What SGLang's default kernels on SM100 (trtllm) leave, see `check_cache` and `refuse_trtllm` of its start."""
    if device.sm // 10 != 10 or model.family == "v4":
        return None
    prefix = "--dsa" if version >= DSA_FLAGS else "--nsa"
    if model.kv_layout == "v32_fp8":
        flags = (f"{prefix}-prefill-backend flashmla_kv", f"{prefix}-decode-backend flashmla_kv")
        what = "refused" if settings.portable == "on" else "left to SGLang"
        return Condition(f"{what} unless {' and '.join(flags)} are given", flags)
    what = "refused" if settings.portable == "on" else "decode left to SGLang"
    return Condition(f"{what} unless {prefix}-decode-backend flashmla_sparse is given")


def needs(engine: Engine, device: DeviceProfile, settings: Settings, *, v4: bool) -> set[Need]:
    """The needs of the ledger entries that an engine's start looks up; `v4`: whether it may serve DeepSeek-V4."""
    if engine.name == sglang_ledger.ENGINE:
        return set(Need)  # whatever the device
    found = set(Need) - set(engine.needs_elsewhere(device))
    if settings.portable == "on" and device.kind == "cuda":
        found.add(Need.PORTABLE)
    return found if v4 else found - {Need.GPU_V4}


def _vllm_has_backend(name: str) -> bool:
    return _vllm_has(f"vllm.v1.attention.backends.registry:AttentionBackendEnum.{name}")


def _vllm_has(path: str) -> bool:
    """Whether the files of the installed vLLM define an object."""
    tree = static.installed(vllm_ledger.ENGINE)
    if tree is None:
        return False
    try:
        tree.check(Target(path=path, kind=Kind.VALUE))
    except (LookupError, SyntaxError):
        return False
    return True
