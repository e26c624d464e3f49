"""What enabling the plugin does with each configuration that an engine serves, as data for the docs and the tests.

The adapters decide at start-up; a test starts every configuration of this table and compares outcome and reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

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


def _configuration(
    engine: str, what: str, given: str, says: str, why: str, outcome: Handling = Handling.STOCK
) -> Configuration:
    return Configuration(engine=engine, what=what, given=given, outcome=outcome, says=says, why=why)


_vllm = partial(_configuration, VLLM)
_sglang = partial(_configuration, SGLANG)
_NOT_BUILT = "the plugin has no code for it"
_OTHER_CACHE = "the plugin's kernels do not read this cache format"

CONFIGURATIONS: tuple[Configuration, ...] = (
    _vllm(
        "decode context parallelism",
        "`--decode-context-parallel-size 2`",
        "--decode-context-parallel-size 2",
        "a rank attends only its part of the KV cache, and the parts are merged by their lse",
    ),
    _vllm(
        "prefill context parallelism",
        "`--prefill-context-parallel-size 2`",
        "--prefill-context-parallel-size 2",
        _NOT_BUILT,
    ),
    _vllm(
        "two batches at once",
        "`--enable-dbo`",
        "--enable-dbo",
        "the plugin keeps one batch's plans, and two batches run at once",
    ),
    _vllm("an fp4 indexer cache", "`attention_config.use_fp4_indexer_cache`", "an fp4 indexer cache", _OTHER_CACHE),
    _vllm("HiSparse", "`attention_config.hisparse_config`", "hisparse", "it moves KV tokens between memories"),
    _vllm(
        "parallel drafting",
        "`--speculative-config` with the method dflash",
        "parallel_drafting of --speculative-config",
        "vLLM counts other query tokens as a verify step there",
    ),
    _vllm(
        "batch invariance",
        "`VLLM_BATCH_INVARIANT=1`",
        "VLLM_BATCH_INVARIANT is set",
        "the plugin picks kernels by batch size, so results depend on it",
    ),
    _vllm("another KV-cache format", "`--kv-cache-dtype nvfp4`", "--kv-cache-dtype is nvfp4", _OTHER_CACHE),
    _vllm(
        "a model whose attention has another shape",
        "`kv_lora_rank` 256 in the checkpoint",
        "kv_lora_rank of",
        "the kernels read rows of 512 + 64 elements",
    ),
    _vllm(
        "pooled indexer keys",
        "`index_kpool` above 1 in the checkpoint",
        "index_kpool of",
        "its indexer selects pools of tokens, not tokens",
    ),
    _vllm(
        "a model with other model code",
        "an architecture that vLLM runs with another module",
        "vLLM runs",
        "the ledger covers DeepSeek-V3.2's module, which GLM-5 shares",
    ),
    _vllm("DeepSeek-V4.1", "its architecture", "supports DeepseekV4ForCausalLM here", "its caches have other formats"),
    _vllm(
        "a GPU before SM80",
        "V100, T4",
        "which needs an SM80 or later GPU",
        "Triton's kernels for the portable path start there",
    ),
    _vllm(
        "DeepSeek-V4 on another GPU than SM90 or SM100",
        "A100, L40S, RTX PRO 6000",
        "which needs an SM90 or SM100 GPU",
        "the portable path is for DeepSeek-V3.2 and GLM-5",
    ),
    _vllm(
        "DeepSeek-V3.2 on SM120 over an fp8 cache",
        "RTX PRO 6000, RTX 5090 with vLLM 0.33 and no `--attention-backend`",
        "Select it with --attention-backend FLASHMLA_SPARSE",
        "vLLM has sparse kernels of FlashInfer there, which were not compared with the plugin's",
    ),
    _vllm(
        "packed indexer scales", "vLLM 0.33 on SM100", "packs the scales of the indexer's cache as UE8M0", _OTHER_CACHE
    ),
    _vllm("another platform", "ROCm, XPU, TPU", "it does not support RocmPlatform", "the kernels are for NVIDIA GPUs"),
    _vllm(
        "decode and verify steps of DeepSeek-V4",
        "`decode_backend` auto",
        "decode_backend is auto",
        "FlashMLA's decode kernel was as fast in every record",
        Handling.PARTLY,
    ),
    _vllm(
        "resharding where it cannot work",
        "`token_shard` on with DeepSeek-V4",
        "token_shard is on and cannot work here",
        "a setting asked for it by name",
        Handling.REFUSED,
    ),
    _sglang("HiSparse", "`--enable-hisparse`", "hisparse is on", "it moves KV tokens between memories"),
    _sglang(
        "prefill context parallelism",
        "`--enable-prefill-cp`",
        "context-parallel prefill is on",
        "a rank attends only its part of the query tokens",
    ),
    _sglang(
        "decode context parallelism",
        "`--dcp-size 2`",
        "context-parallel decode is on",
        "a rank attends only its part of the KV cache",
    ),
    _sglang("pooled indexer keys", "in the checkpoint", "pooled indexer keys is on", "its indexer selects pools"),
    _sglang("a sharded KV cache", "a KV shard pool", "a sharded KV cache is on", _NOT_BUILT),
    _sglang(
        "deterministic inference",
        "`--enable-deterministic-inference`",
        "deterministic inference is on",
        "the plugin picks kernels by batch size, so results depend on it",
    ),
    _sglang(
        "another attention kernel for prefill or decode",
        "`--dsa-prefill-backend tilelang`, `flashmla_sparse_q8`, `triton_sparse_mla`, `aiter`; SM100's defaults",
        "fall back to the stock path",
        "a flag or SGLang's default names it, and the other phase is still served",
        Handling.PARTLY,
    ),
    _sglang(
        "a cache without scales",
        "trtllm's kernels over `--kv-cache-dtype fp8_e4m3`",
        "without scales, which the plugin does not support",
        _OTHER_CACHE,
    ),
    _sglang(
        "another attention backend",
        "`--attention-backend` other than dsa",
        "with another attention backend than dsa",
        "the user asked for it",
    ),
    _sglang(
        "decode steps of a model with attention sinks",
        "in the checkpoint",
        "the model has attention sinks: decode, verify and draft steps",
        "SGLang's path fa3 does not support them",
        Handling.PARTLY,
    ),
    _sglang(
        "decode, verify and draft steps of DeepSeek-V4",
        "`--nsa-plugin-decode-backend auto`",
        "decode_backend is auto",
        "FlashMLA's decode kernel was as fast in every record",
        Handling.PARTLY,
    ),
    _sglang("DeepSeek-V4.1", "its architecture", "DeepSeek-V4.1 is on", "its caches have other formats"),
    _sglang(
        "Ray actors", "`--use-ray`", "SGLang does not load plugins in Ray actors", "the plugin is never loaded there"
    ),
    _sglang(
        "DeepSeek-V4 on a GPU of the portable path",
        "A100, L40S",
        "DeepSeek-V4 needs an SM90 or SM100 GPU",
        "the portable path is for DeepSeek-V3.2 and GLM-5",
    ),
    _sglang(
        "an older SGLang on a GPU of the portable path",
        "SGLang 0.5.22 on an A100",
        "portable path supports SGLang",
        "it knows the code of SGLang 0.5.23",
    ),
    _sglang(
        "mixed chunks on the portable path",
        "`--enable-mixed-chunk` over an fp8 cache on an A100",
        "does not support --enable-mixed-chunk",
        "a batch of prefills and decode steps over an fp8 cache has no plan under SGLang",
    ),
    _sglang(
        "the portable path by name in an older SGLang",
        "`--nsa-plugin-portable on` before 0.5.23",
        "portable is on and cannot work with SGLang",
        "a setting asked for it by name, and it needs SGLang 0.5.23",
        Handling.REFUSED,
    ),
    _sglang(
        "trtllm by SGLang's flag where it cannot run",
        "`--dsa-decode-backend trtllm` on an H200",
        "TRT-LLM's sparse MLA kernels need SM100",
        "SGLang takes the flag and fails later",
        Handling.REFUSED,
    ),
    _sglang(
        "a model with sparse attention on a CPU",
        "`--device cpu`",
        "needs a GPU",
        "stock SGLang does not support it there either",
        Handling.REFUSED,
    ),
)
