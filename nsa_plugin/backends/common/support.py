"""What enabling the plugin does with each configuration that an engine serves, as data for the docs and the tests.

The adapters decide at start-up; a test starts every configuration of this table and compares outcome and reason.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from nsa_plugin.backends.common.paths import SGLANG, VLLM


class Handling(StrEnum):
    """Outcome of enabling the plugin with a configuration."""

    STOCK = "left to the stock engine"
    PARTLY = "partly left to the stock engine"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One configuration that the plugin does not serve, or not in full.

    Attributes:
        engine: SGLang or vLLM.
        what: the feature.
        given: how a user or the engine turns it on.
        outcome: what the plugin does, unless `strict` is `full`, which refuses what is left to the stock engine.
        says: words of the message in the log and in the start-up report.
        why: the reason, for the docs.
    """

    engine: str
    what: str
    given: str
    outcome: Handling
    says: str
    why: str


def _configurations(engine: str, text: str) -> Iterator[Configuration]:
    """Read "what[ (partly)|(refused)] | given", then indented "says | ..." and "why | ..."; lines may continue."""
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(text).strip()):
        fields = re.fullmatch(_ENTRY, " ".join(entry.split()))
        assert fields, entry
        what, mark, given, says, why = fields.groups()
        outcome = Handling[mark.upper()] if mark else Handling.STOCK
        yield Configuration(engine=engine, what=what, given=given, outcome=outcome, says=says, why=why)


_ENTRY = r"(.+?)(?: \((partly|refused)\))? \| (.+) says \| (.+) why \| (.+)"
_VLLM = """
    decode context parallelism | `--decode-context-parallel-size 2`
        says | --decode-context-parallel-size 2
        why | a rank attends only its part of the KV cache, and the parts are merged by their lse
    prefill context parallelism | `--prefill-context-parallel-size 2`
        says | --prefill-context-parallel-size 2
        why | the plugin has no code for it
    two batches at once | `--enable-dbo`
        says | --enable-dbo
        why | the plugin keeps one batch's plans, and two batches run at once
    an fp4 indexer cache | `attention_config.use_fp4_indexer_cache`
        says | an fp4 indexer cache
        why | the plugin's kernels do not read this cache format
    HiSparse | `attention_config.hisparse_config`
        says | hisparse
        why | it moves KV tokens between memories
    parallel drafting | `--speculative-config` with the method dflash
        says | parallel_drafting of --speculative-config
        why | vLLM counts other query tokens as a verify step there
    batch invariance | `VLLM_BATCH_INVARIANT=1`
        says | VLLM_BATCH_INVARIANT is set
        why | the plugin picks kernels by batch size, so results depend on it
    another KV-cache format | `--kv-cache-dtype nvfp4`
        says | --kv-cache-dtype is nvfp4
        why | the plugin's kernels do not read this cache format
    a model whose attention has another shape | `kv_lora_rank` 256 in the checkpoint
        says | kv_lora_rank of
        why | the kernels read rows of 512 + 64 elements
    pooled indexer keys | `index_kpool` above 1 in the checkpoint
        says | index_kpool of
        why | its indexer selects pools of tokens, not tokens
    a model with other model code | an architecture that vLLM runs with another module
        says | vLLM runs
        why | the ledger covers DeepSeek-V3.2's module, which GLM-5 shares
    DeepSeek-V4.1 | its architecture
        says | supports DeepseekV4ForCausalLM here
        why | its caches have other formats
    a GPU before SM80 | V100, T4
        says | which needs an SM80 or later GPU
        why | Triton's kernels for the portable path start there
    DeepSeek-V4 on another GPU than SM90 or SM100 | A100, L40S, RTX PRO 6000
        says | which needs an SM90 or SM100 GPU
        why | the portable path is for DeepSeek-V3.2 and GLM-5
    DeepSeek-V3.2 on SM120 over an fp8 cache | RTX PRO 6000, RTX 5090 with vLLM 0.33 and no `--attention-backend`
        says | Select it with --attention-backend FLASHMLA_SPARSE
        why | vLLM has sparse kernels of FlashInfer there, which were not compared with the plugin's
    another attention backend | `--attention-backend FLASHINFER_MLA_SPARSE`
        says | layers on vLLM's backend FLASHINFER_MLA_SPARSE
        why | the user asked for it
    vLLM's default backend on SM100 | B200 with no `--attention-backend`, where vLLM picks FLASHINFER_MLA_SPARSE
        says | vLLM chose FLASHINFER_MLA_SPARSE, on SM100
        why | on SM100 the plugin was not compared with it
    a bf16 cache on SM90 | an H200 with vLLM 0.25 or later, no `--attention-backend` and no backend setting
        says | no times on SM90 for
        why | vLLM picks FLASH_ATTN_MLA_SPARSE, which pads no heads and was not compared with the plugin
    packed indexer scales | vLLM 0.33 on SM100
        says | packs the scales of the indexer's cache as UE8M0
        why | the plugin's kernels do not read this cache format
    another platform | ROCm, XPU, TPU
        says | it does not support RocmPlatform
        why | the kernels are for NVIDIA GPUs
    decode and verify steps of DeepSeek-V4 (partly) | `decode_backend` auto
        says | decode_backend is auto
        why | FlashMLA's decode kernel was as fast in every record
    resharding where it cannot work (refused) | `token_shard` on with DeepSeek-V4
        says | token_shard is on and cannot work here
        why | a setting asked for it by name
"""
_SGLANG = """
    HiSparse | `--enable-hisparse`
        says | hisparse is on
        why | it moves KV tokens between memories
    prefill context parallelism | `--enable-prefill-cp`
        says | context-parallel prefill is on
        why | a rank attends only its part of the query tokens
    decode context parallelism | `--dcp-size 2`
        says | context-parallel decode is on
        why | a rank attends only its part of the KV cache
    pooled indexer keys | in the checkpoint
        says | pooled indexer keys is on
        why | its indexer selects pools
    a sharded KV cache | a KV shard pool
        says | a sharded KV cache is on
        why | the plugin has no code for it
    deterministic inference | `--enable-deterministic-inference`
        says | deterministic inference is on
        why | the plugin picks kernels by batch size, so results depend on it
    another attention kernel for prefill or decode (partly) | `--dsa-prefill-backend tilelang`, `flashmla_sparse_q8`,
        `triton_sparse_mla`, `aiter`; SM100's defaults
        says | fall back to the stock path
        why | a flag or SGLang's default names it, and the other phase is still served
    SM100's default kernels over a bf16 cache (partly) | a B200 with `--kv-cache-dtype bfloat16`
        says | -decode-backend is trtllm: decode, verify and draft steps fall back to the stock path
        why | SGLang's default names trtllm for decode, and prefills are still served
    another platform | ROCm
        says | nsa-plugin's kernels are for NVIDIA GPUs
        why | the kernels are for NVIDIA GPUs
    a cache without scales | trtllm's kernels over `--kv-cache-dtype fp8_e4m3`
        says | without scales, which the plugin does not support
        why | the plugin's kernels do not read this cache format
    another attention backend | `--attention-backend` other than dsa
        says | with another attention backend than dsa
        why | the user asked for it
    decode steps of a model with attention sinks (partly) | in the checkpoint
        says | the model has attention sinks: decode, verify and draft steps
        why | SGLang's path fa3 does not support them
    decode, verify and draft steps of DeepSeek-V4 (partly) | `--nsa-plugin-decode-backend auto`
        says | decode_backend is auto
        why | FlashMLA's decode kernel was as fast in every record
    DeepSeek-V4's fp4 indexer (partly) | `--enable-deepseek-v4-fp4-indexer`
        says | --enable-deepseek-v4-fp4-indexer is on: V4's selection
        why | the plugin's kernels do not read fp4 keys; attention is still served
    DeepSeek-V4.1 | its architecture
        says | DeepSeek-V4.1 is on
        why | its caches have other formats
    Ray actors | `--use-ray`
        says | SGLang does not load plugins in Ray actors
        why | the plugin is never loaded there
    DeepSeek-V4 on a GPU of the portable path | A100, L40S
        says | DeepSeek-V4 needs an SM90 or SM100 GPU
        why | the portable path is for DeepSeek-V3.2 and GLM-5
    an older SGLang on a GPU of the portable path | SGLang 0.5.22 on an A100
        says | portable path supports SGLang
        why | it knows the code of SGLang 0.5.23
    mixed chunks on the portable path | `--enable-mixed-chunk` over an fp8 cache on an A100
        says | does not support --enable-mixed-chunk
        why | a batch of prefills and decode steps over an fp8 cache has no plan under SGLang
    the portable path by name in an older SGLang (refused) | `--nsa-plugin-portable on` before 0.5.23
        says | portable is on and cannot work with SGLang
        why | a setting asked for it by name, and it needs SGLang 0.5.23
    trtllm by SGLang's flag where it cannot run (refused) | `--dsa-decode-backend trtllm` on an H200
        says | TRT-LLM's sparse MLA kernels need SM100
        why | SGLang takes the flag and fails later
    a model with sparse attention on a CPU (refused) | `--device cpu`
        says | needs a GPU
        why | stock SGLang does not support it there either
"""

CONFIGURATIONS = (*_configurations(VLLM, _VLLM), *_configurations(SGLANG, _SGLANG))
