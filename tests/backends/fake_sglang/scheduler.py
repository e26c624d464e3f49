"""A scheduler process of SGLang with stand-ins for its objects: what the plugin looks at of them, and their order."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nsa_plugin.backends.sglang.startup import backend
from nsa_plugin.backends.sglang.startup.activation import SglangProcess

HF_CONFIG = SimpleNamespace(
    architectures=["DeepseekV32ForCausalLM"],
    num_attention_heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_topk=2048,
    index_n_heads=64,
    index_head_dim=128,
)
V4_CONFIG = SimpleNamespace(
    architectures=["DeepseekV4ForCausalLM"],
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    index_topk=512,
    index_n_heads=64,
    index_head_dim=128,
    compress_ratios=[0, 4, 128],
)


class StockBackend:
    """The parts of SGLang's scheduler that the plugin reads."""

    def __init__(self, model_runner: Any, skip_prefill: bool = False, topk: int = 0) -> None:
        self.device = model_runner.device
        self.num_q_heads = 16
        self.dsa_kv_cache_store_fp8 = model_runner.scaled_fp8
        self.dsa_prefill_impl = "flashmla_kv" if model_runner.scaled_fp8 else "flashmla_sparse"
        self.dsa_decode_impl = "flashmla_kv" if model_runner.scaled_fp8 else "fa3"
        self.real_page_size = 64
        self.max_context_len = 65536
        self.speculative_num_draft_tokens = None
        self.topk = topk

    def set_dsa_prefill_impl(self, forward_batch: Any = None) -> None: ...
    def init_forward_metadata(self, forward_batch: Any) -> None: ...
    def get_indexer_metadata(self, layer_id: int, forward_batch: Any) -> None: ...
    def _compute_flashmla_metadata(self, cache_seqlens: Any, seq_len_q: int) -> None: ...
    def _forward_flashmla_kv(self, **arguments: Any) -> None: ...
    def _forward_flashmla_sparse(self, **arguments: Any) -> None: ...
    def _forward_fa3(self, **arguments: Any) -> None: ...
    def _apply_cuda_graph_metadata(self, bs: int, forward_mode: Any) -> None: ...


def picking(prefill: str, decode: str) -> type[StockBackend]:
    """The class with the kernels that SGLang or the user picked."""

    class Picked(StockBackend):
        def __init__(self, model_runner: Any, skip_prefill: bool = False, topk: int = 0) -> None:
            super().__init__(model_runner, skip_prefill, topk)
            self.dsa_prefill_impl, self.dsa_decode_impl = prefill, decode

    return Picked


def runner(
    *,
    device: str = "cuda",
    scaled_fp8: bool = False,
    dtype: str = "torch.bfloat16",
    config: Any = HF_CONFIG,
    **server_args: Any,
) -> SimpleNamespace:
    return SimpleNamespace(
        device=device,
        scaled_fp8=scaled_fp8,
        kv_cache_dtype=dtype,
        tp_rank=0,
        server_args=SimpleNamespace(**server_args),
        model_config=SimpleNamespace(num_attention_heads=128, hf_config=config, hf_text_config=config),
    )


def scheduler(config: Any = HF_CONFIG) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=config))


def start(process: SglangProcess, config: Any = HF_CONFIG, build: SimpleNamespace | None = None) -> None:
    """Run the events of a scheduler process in order."""
    process.enter_scheduler()
    if build is not None:
        backend.make(StockBackend)(build, topk=4)
    process.leave_scheduler(scheduler(config))


def read(report: Path) -> dict[str, Any]:
    return dict(json.loads(report.read_text()))
