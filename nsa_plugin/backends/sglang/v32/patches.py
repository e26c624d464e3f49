"""Replacements of SGLang's ledger: of its prefill graphs, and for the portable path (`patches.sglang_portable`).

Those of the portable path are installed only there. Before the plugin serves, once it has stopped, and where it leaves
every batch to the stock path, they call the original. Only the number of SMs is always the device's: SGLang asks for it
while it builds the model, before the plugin knows whether it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.sglang.startup.activation import process
from nsa_plugin.backends.sglang.v32.indexer import ATTRIBUTE, Selection
from nsa_plugin.backends.sglang.v32.portable import is_dense, no_schedule, quantize, select_steps, write
from nsa_plugin.libraries.architectures import FIRST_WITH_FP8
from nsa_plugin.patches.ledger import wrap

if TYPE_CHECKING:
    from nsa_plugin.backends.sglang.startup.serving import SglangServing


def wrap_can_run_graph(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap `PrefillCudaGraphRunner.can_run_graph`, the last check of a batch, padded and not yet prepared.

    From 0.5.17 on SGLang captures prefills for models with sparse attention (`--cuda-graph-max-bs-prefill`, breakable
    CUDA graphs): of up to 2048 tokens, and since 0.5.23 of a whole chunk, up to 8192. A captured prefill is always
    sparse, since its projections are those of absorbed attention. Whether the graph or dense attention saves more
    depends on the batch, so prefills that the plan makes dense run eagerly only with `mha_max_kv` set, those that it
    splits with `split_prefill=on`, and those that it reshards with `token_shard=on`.
    """

    def around(original: Callable[..., bool], runner: Any, forward_batch: Any) -> bool:
        if not original(runner, forward_batch):
            return False
        leaves = getattr(runner.model_runner.attn_backend, "nsa_plugin_leaves_graph", None)
        return leaves is None or not leaves(forward_batch)

    return wrap(original, around)


def _serving() -> SglangServing | None:
    """Return the plugin's state in this process; None while no backend takes plans."""
    serving = process().serving
    return serving if serving is not None and serving.active else None


def providers_without_fp8() -> Providers | None:
    """Return the providers if the plugin serves on a GPU without fp8 instructions, else None."""
    serving = _serving()
    return None if serving is None or serving.device.sm >= FIRST_WITH_FP8 else serving.providers


class DeepGemm:
    """DeepGEMM as SGLang's `dsa` modules see it: all of `original`, but what the plugin does itself.

    Attributes of `original`, the module or the error of its import, stay reachable.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def get_num_sms(self) -> int:
        return _sm_count()

    def get_paged_mqa_logits_metadata(self, context_lens: torch.Tensor, block_size: int, num_sms: int) -> torch.Tensor:
        """Return DeepGEMM's schedule, int32 [num_sms + 1, 2]; while the plugin serves, one that nothing reads."""
        make = no_schedule if _serving() is not None else self._original.get_paged_mqa_logits_metadata
        return make(context_lens, block_size, num_sms)  # type: ignore[no-any-return]


def wrap_deep_gemm(original: Any) -> DeepGemm:
    """Wrap the name `deep_gemm` of SGLang's modules."""
    return DeepGemm(original)


def wrap_topk_plan(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DeepseekSparseAttnBackend._build_topk_v2_plan`; SGLang takes None if its kernel is not used."""
    return wrap(original, lambda original, *given: original(*given) if _serving() is None else None)


def wrap_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `resolve_paged_mqa_logits_metadata_fn`, which returns DeepGEMM's function."""
    return wrap(original, lambda original: original() if _serving() is None else no_schedule)


def wrap_sm_count(original: Callable[..., int]) -> Callable[..., int]:
    """Wrap `resolve_num_sms`."""
    return wrap(original, lambda original: _sm_count())


def _sm_count() -> int:
    return int(torch.cuda.get_device_properties().multi_processor_count)


def wrap_skip_logits(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap `Indexer._should_skip_logits_computation`: while the plugin serves, only a dense prefill has no logits."""

    def around(original: Callable[..., bool], indexer: Any, forward_batch: Any) -> bool:
        return original(indexer, forward_batch) if _serving() is None else is_dense(forward_batch)

    return wrap(original, around)


def wrap_topk_paged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Indexer._get_topk_paged`."""

    def around(
        original: Callable[..., Any],
        indexer: Any,
        forward_batch: Any,
        layer_id: int,
        q_fp8: torch.Tensor,
        weights: torch.Tensor,
        metadata: Any,
    ) -> Any:
        selection: Selection | None = getattr(metadata, ATTRIBUTE, None)
        if selection is None:
            return original(indexer, forward_batch, layer_id, q_fp8, weights, metadata)
        mode = forward_batch.forward_mode
        expanded = mode.is_target_verify() or mode.is_draft_extend_v2()
        lengths = metadata.get_seqlens_expanded() if expanded else metadata.get_seqlens_int32()
        keys = indexer._get_index_k_read_buffer(selection.pool, layer_id)
        return select_steps(selection, indexer, q_fp8, keys, weights, lengths, metadata)

    return wrap(original, around)


def wrap_act_quant(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `act_quant`."""

    def around(original: Callable[..., Any], x: torch.Tensor, block_size: int = 128, scale_fmt: Any = None) -> Any:
        providers = providers_without_fp8()
        if providers is None or x.shape[-1] != block_size or scale_fmt is None:
            return original(x, block_size, scale_fmt)
        return quantize(x, providers)

    return wrap(original, around)


def wrap_write(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `MLATokenToKVPool._write_mla_kv_buffer`."""

    def around(
        original: Callable[..., None],
        pool: Any,
        dst_buffer: torch.Tensor,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
    ) -> None:
        providers = providers_without_fp8()
        if providers is None or not pool.dsa_kv_cache_store_fp8:
            original(pool, dst_buffer, loc, cache_k_nope, cache_k_rope)
        else:
            write(providers, dst_buffer, loc, cache_k_nope, cache_k_rope)

    return wrap(original, around)
