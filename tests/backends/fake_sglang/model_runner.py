"""SGLang's model runner in miniature, and an attention backend built from it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nsa_plugin.backends.sglang.v32.attention import with_plans
from tests.backends.fake_sglang.v32 import MODEL, DsaBackend

CONFIG = SimpleNamespace(
    num_attention_heads=MODEL.num_heads,
    **{
        name: getattr(MODEL, name)
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk")
    },
    index_n_heads=64,
    index_head_dim=128,
)


def runner(tp_rank: int = 0, **server_args: Any) -> Any:
    return SimpleNamespace(
        tp_rank=tp_rank,
        pp_rank=0,
        dp_rank=None,
        kv_cache_dtype="torch.float8_e4m3fn",
        model_config=SimpleNamespace(hf_config=CONFIG, hf_text_config=CONFIG),
        server_args=SimpleNamespace(**server_args),
    )


def keep_arguments_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang 0.5.23 does: what it decides is in `_resolved_overrides`, and the attribute is what the user gave."""

    def resolution_result(server_args: Any, field: str, default: Any = None) -> Any:
        for _, declared in reversed(getattr(server_args, "_resolved_overrides", None) or ()):
            if field in declared:
                return declared[field]
        return getattr(server_args, field, default)

    module = ModuleType("sglang.srt.arg_groups.overrides")
    module.resolution_result = resolution_result  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def decided(**fields: Any) -> dict[str, Any]:
    """Arguments of a server whose raw ones are all None; see `keep_arguments_raw`."""
    return {**dict.fromkeys(fields), "_resolved_overrides": [("defaults", fields)]}


def built(original: type = DsaBackend, prefill: str = "flashmla_kv", decode: str = "flashmla_kv") -> Any:
    """A backend of the plugin's class, as it is when SGLang's own start of it is done."""
    backend = with_plans(original)(prefill, decode)
    backend.num_q_heads, backend.device = MODEL.heads_per_rank, "cpu"
    setattr(backend, f"{original.x}_kv_cache_store_fp8", True)  # type: ignore[attr-defined]
    return backend
