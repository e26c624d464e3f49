"""One decision: `decide` routes a batch, `partition` splits a prefill first, `validate` checks before serving.

Pure: no torch, no engine, no I/O; the same arguments give the same plan. The rules are those of
SGLang's pull requests #12788 and #12964 (dense attention for short prefills), #13544 (one place that
decides), #16758 and #17662 (TRT-LLM), #13646 (tensor parallelism, indexer memory) and #25502
(DeepSeek-V4 prefills of many rows). Limits come from the `DeviceProfile`, never from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nsa_plugin.candidates import (
    DEQUANTIZE_KV_PER_ROW,
    OPS,
    Load,
    Refusal,
    Route,
    capability_refusal,
    dense_routes,
    dequantizing_pays,
    exceeds_large_q,
    route_refusal,
    sparse_routes,
)
from nsa_plugin.devices import MIB, DeviceProfile, Op
from nsa_plugin.errors import NoProviderError, NsaPluginError, SettingsError
from nsa_plugin.plan import Attention, IndexerMode, IndexerPlan, Plan
from nsa_plugin.settings import Settings
from nsa_plugin.shapes import BatchShape, ModelShape, Phase

# Below this many rows the two all-to-alls cost about what the unpadded kernel saves: 97 to 131 us each
# over NVLink against 0.5 us a padded row of 16 heads (measured on H200).
TOKEN_SHARD_MIN_ROWS = 512
# V4's indexer scores keys that are compressed by this factor.
V4_COMPRESSION = 4
LOGIT_BYTES = 4


@dataclass(frozen=True)
class Part:
    """Requests of a batch that share a plan.

    Attributes:
        requests: their places in the batch, ascending.
        plan: their plan.
        batch: their shape.
    """

    requests: tuple[int, ...]
    plan: Plan
    batch: BatchShape


@dataclass(frozen=True)
class _Case:
    """One decision's inputs."""

    model: ModelShape
    batch: BatchShape
    device: DeviceProfile
    settings: Settings

    @property
    def backend_setting(self) -> str:
        return "prefill_backend" if self.batch.phase is Phase.EXTEND else "decode_backend"

    @property
    def asked(self) -> str:
        """The library that the settings name for this phase, or "auto"."""
        return str(getattr(self.settings, self.backend_setting))

    @property
    def own_load(self) -> Load:
        return Load(self.batch.num_tokens, self.model.heads_per_rank)

    def refusal(self, route: Route, load: Load, asked: str) -> str | None:
        return route_refusal(route, self.model, self.batch, self.device, self.settings, load, asked)


def decide(model: ModelShape, batch: BatchShape, device: DeviceProfile, settings: Settings) -> Plan:
    """The plan of a batch.

    Args:
        model: the model on this rank.
        batch: the batch, or the part of one that shares a plan.
        device: what this machine has; `memory_free` is read as free now.
        settings: what the user chose.

    Raises:
        SettingsError: a setting contradicts the model, the device, or what this batch needs.
        NoProviderError: no installed kernel carries the batch; lists each and why not.
    """
    case = _Case(model, batch, device, settings)
    _check_settings(model, device, settings)
    reasons = {"phase": _phase_sentence(batch)}
    if batch.phase is Phase.IDLE or batch.num_tokens == 0:
        return _idle_plan(batch, reasons)
    route, refused, not_dense = _pick_dense(case)
    if route is not None:
        return _dense_plan(case, route, refused, reasons)
    return _sparse_plan(case, not_dense, reasons)


def partition(
    model: ModelShape,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    phase: Phase,
    device: DeviceProfile,
    settings: Settings,
    *,
    cuda_graph: bool = False,
    context_parallel: bool = False,
    attention_workspace_tokens: int = 0,
) -> tuple[Part, ...]:
    """A batch split so that one long prompt does not take dense attention from the short ones.

    Only a prefill is split: into parts of dense requests, each within the workspace, then one part of
    the sparse requests, then one of the requests that have no rows. Every request is in exactly one
    part and keeps its order within it. An empty batch has no parts.

    Args:
        q_lens, kv_lens: new rows and whole context of each request, in tokens.
        cuda_graph, context_parallel, attention_workspace_tokens: see `BatchShape`.

    Raises:
        ShapeError: the lengths cannot belong together.
        SettingsError, NoProviderError: see `decide`.
    """

    def shape(requests: Sequence[int]) -> BatchShape:
        return BatchShape.from_lengths(
            phase,
            [q_lens[request] for request in requests],
            [kv_lens[request] for request in requests],
            cuda_graph=cuda_graph,
            context_parallel=context_parallel,
            attention_workspace_tokens=attention_workspace_tokens,
        )

    def part(requests: Sequence[int]) -> Part:
        batch = shape(requests)
        return Part(tuple(requests), decide(model, batch, device, settings), batch)

    whole = BatchShape.from_lengths(phase, q_lens, kv_lens)
    everything = range(len(q_lens))
    if phase is not Phase.EXTEND or whole.num_tokens == 0:
        return (part(everything),) if everything else ()
    live = [request for request in everything if q_lens[request]]
    empty = [request for request in everything if not q_lens[request]]
    dense, sparse = _split_dense(_Case(model, shape(live), device, settings), live, kv_lens)
    return tuple(part(requests) for requests in (*dense, sparse, empty) if requests)


def validate(
    model: ModelShape,
    device: DeviceProfile,
    settings: Settings,
    *,
    max_tokens: int = 1,
    cuda_graph: bool = False,
) -> None:
    """Raise before serving what `decide` would raise for a batch of this configuration.

    Args:
        max_tokens: most query rows that a prefill batch may have (the engine's chunk size).
        cuda_graph: decode batches are captured.

    Raises:
        SettingsError: a setting contradicts the model or the device, or names a library that cannot
            carry prefill or decode here.
        NoProviderError: no installed kernel carries prefill or decode.
    """
    beyond = model.index_topk + max_tokens
    prefill = BatchShape(
        phase=Phase.EXTEND,
        num_requests=1,
        num_tokens=max_tokens,
        max_kv_len=beyond,
        total_kv_len=beyond,
        has_prefix=True,
    )
    decode = replace(prefill, phase=Phase.DECODE, num_tokens=1, cuda_graph=cuda_graph)
    errors: list[NsaPluginError] = []
    for batch in (prefill, decode):
        try:
            decide(model, batch, device, settings)
        except NsaPluginError as error:
            if str(error) not in map(str, errors):
                errors.append(error)
    if errors:
        raise type(errors[0])("; ".join(map(str, errors)))


# ---------------------------------------------------------------------------------------------------
# Settings that no batch can satisfy


def _check_settings(model: ModelShape, device: DeviceProfile, settings: Settings) -> None:
    if settings.mha_max_kv > model.index_topk:
        raise SettingsError(
            f"mha_max_kv is {settings.mha_max_kv}; allowed: -1 or 0 to the model's index_topk {model.index_topk}, "
            "because longer contexts have tokens that the indexer would leave out"
        )
    if model.family == "v4" and settings.large_q_rows:
        capability = device.capability("flash_mla", Op.SPARSE_MLA_DECODE, model.kv_layout)
        if capability and capability.max_rows is not None and settings.large_q_rows > capability.max_rows:
            raise SettingsError(
                f"large_q_rows is {settings.large_q_rows}; allowed: 0 to {capability.max_rows}, the query rows "
                f"that the installed FlashMLA {device.libraries['flash_mla'].version} takes on this device"
            )
    if settings.token_shard == "on" and (reason := _token_shard_impossible(model, device)):
        raise SettingsError(f"token_shard is on and cannot work here: {reason}; allowed here: auto, off")


# ---------------------------------------------------------------------------------------------------
# Attention


def _mha_limit(model: ModelShape, settings: Settings) -> int:
    """Longest context, in tokens, that may be attended densely."""
    return model.index_topk if settings.mha_max_kv < 0 else settings.mha_max_kv


def _dense_ruled_out(case: _Case) -> str | None:
    """Why no request of the batch may be dense, whatever its length; None if one may."""
    batch = case.batch
    if batch.phase is not Phase.EXTEND:
        return f"{batch.phase} always selects"
    if case.model.family != "v3.2":
        return f"family {case.model.family} attends a window and compressed keys"
    if batch.cuda_graph:
        return "a captured graph cannot branch on lengths"
    if batch.context_parallel:
        return "the prefill is split over a context-parallel group"
    if case.settings.mha_max_kv == 0:
        return "mha_max_kv is 0"
    return None


def _dense_too_long(case: _Case) -> str | None:
    """Why the batch's lengths rule dense attention out; None if they do not."""
    batch, limit = case.batch, _mha_limit(case.model, case.settings)
    if batch.max_kv_len > limit:
        return f"the longest context of {batch.max_kv_len} tokens exceeds mha_max_kv {limit}"
    if 0 < batch.attention_workspace_tokens < batch.total_kv_len:
        return (
            f"{batch.total_kv_len} context tokens exceed the attention workspace of "
            f"{batch.attention_workspace_tokens}"
        )
    return None


def _pick_dense(case: _Case) -> tuple[Route | None, list[Refusal], str]:
    """The dense route, what was refused before it, and, if there is none, why not."""
    reason = _dense_ruled_out(case) or _dense_too_long(case)
    if reason:
        return None, [], reason
    # The settings name libraries of sparse attention; on a CPU the reference is all there is.
    route, refused = _first(dense_routes(), lambda route: case.refusal(route, case.own_load, "auto"))
    return route, refused, "no dense kernel: " + "; ".join(map(str, refused))


def _first(
    routes: Sequence[Route], refusal: Callable[[Route], str | None]
) -> tuple[Route | None, list[Refusal]]:
    """The first route that is not refused, and the refusals before it."""
    refused: list[Refusal] = []
    for route in routes:
        reason = refusal(route)
        if reason is None:
            return route, refused
        refused.append(Refusal(route, reason))
    return None, refused


def _pick_sparse(case: _Case, load: Load) -> tuple[Route, list[Refusal]]:
    """The route that carries the batch, and the better ones that do not.

    Raises:
        SettingsError: the library that the settings name cannot.
        NoProviderError: none can.
    """
    routes = sparse_routes(case.model, case.batch, case.device, load.heads)
    if case.asked == "auto":
        route, refused = _first(routes, lambda route: case.refusal(route, load, "auto"))
        if route is None:
            raise NoProviderError(
                f"no installed kernel library carries {_phase_sentence(case.batch)}, {load.heads} heads, "
                f"{case.model.kv_layout} cache, on {case.device.where}: " + "; ".join(map(str, refused))
            )
        return route, refused
    named = [route for route in routes if route.library == case.asked]
    route, refused = _first(named, lambda route: case.refusal(route, load, case.asked))
    if route is None:
        others = (*(r for r in routes if r.library != case.asked),)
        work = dict.fromkeys(r.library for r in others if case.refusal(r, load, r.library) is None)
        raise SettingsError(
            f"{case.backend_setting} is {case.asked} and cannot carry {_phase_sentence(case.batch)}: "
            + "; ".join(map(str, refused))
            + f". What would work here: {', '.join(work) or 'no installed library'}"
        )
    return route, refused


def _attention_sentence(case: _Case, route: Route, load: Load) -> str:
    model, batch = case.model, case.batch
    if route.dequantize_kv and model.family == "v4" and exceeds_large_q(model, batch, case.settings, load.rows):
        return (
            f"{load.rows} query rows exceed large_q_rows {case.settings.large_q_rows}, so the prefill kernel "
            "takes them"
        )
    if route.dequantize_kv and dequantizing_pays(model, batch, case.device):
        return (
            f"{batch.total_kv_len} context tokens are fewer than {DEQUANTIZE_KV_PER_ROW} for each of "
            f"{batch.num_tokens} query rows, so a bf16 copy costs less than reading fp8 in place"
        )
    kernel = "prefill" if route.attention is Attention.SPARSE_PREFILL else "decode"
    selected = f"{load.rows} query rows attend to {model.index_topk} selected tokens each"
    if route.dequantize_kv:
        return f"{selected}; {route.library}'s {kernel} kernel takes them over a bf16 copy of the cache"
    return f"{selected}; {route.library}'s {kernel} kernel reads the {model.kv_layout} cache in place"


def _provider_sentence(case: _Case, route: Route, refused: Sequence[Refusal], asked: str) -> str:
    if asked != "auto":
        chosen = f"{case.backend_setting} asks for {asked}"
    elif case.device.kind == "cpu":
        chosen = "on a CPU the plugin's plain-torch reference is what runs"
    else:
        chosen = f"{route.library} is the first that carries the batch on {case.device.where}"
    better = [refusal for refusal in refused if refusal.route.library != route.library]
    if better and case.device.kind != "cpu":
        chosen += "; better ones refused: " + "; ".join(map(str, better))
    return chosen


# ---------------------------------------------------------------------------------------------------
# The plan's other fields


def _head_padding(case: _Case, route: Route, heads: int) -> tuple[int, str]:
    """(heads that the kernel is given if not `heads`, else 0; why)."""
    layout = "bf16" if route.dequantize_kv else case.model.kv_layout
    capability = case.device.capability(route.library, OPS[route.attention], layout)
    given = capability.heads_given(heads) if capability else None
    if given is None or given == heads:
        return 0, f"{route.library} takes {heads} heads as they are"
    return given, f"{route.library}'s kernel on {case.device.where} takes no fewer than {given} heads; there are {heads}"


def _token_shard_impossible(model: ModelShape, device: DeviceProfile) -> str | None:
    """Why no batch of this configuration can trade heads for tokens; None if one can."""
    if model.attn_tp_size == 1:
        return "attn_tp_size is 1, so this rank already has every head"
    if not device.providers(Op.TOKEN_SHARD):
        return "this installation of nsa-plugin has no token_shard kernels"
    return None


def _token_shard(case: _Case, route: Route) -> tuple[bool, str]:
    """Whether the batch trades heads for tokens around the kernel, and why."""
    model, batch, mode = case.model, case.batch, case.settings.token_shard
    if mode == "off":
        return False, "token_shard is off"
    if impossible := _token_shard_impossible(model, case.device):
        return False, impossible
    if batch.context_parallel:
        return False, "the prefill is split over a context-parallel group already"
    least = model.attn_tp_size if mode == "on" else max(TOKEN_SHARD_MIN_ROWS, model.attn_tp_size)
    if batch.num_tokens < least:
        return False, f"{batch.num_tokens} query rows are fewer than the {least} from which sharding is used"
    padding, _ = _head_padding(case, route, model.heads_per_rank)
    if mode == "auto" and not padding:
        return False, f"{route.library} takes {model.heads_per_rank} heads without padding"
    if mode == "auto" and not case.device.nvlink:
        return False, "the device has no NVLink, and the exchange was measured over NVLink only"
    gain = f"instead of {model.heads_per_rank} padded to {padding}" if padding else f"instead of {model.heads_per_rank}"
    return True, (
        f"{model.attn_tp_size} ranks take {_sharded(case).rows} of {batch.num_tokens} query rows each with all "
        f"{model.num_heads} heads {gain}"
    )


def _sharded(case: _Case) -> Load:
    return Load(-(-case.batch.num_tokens // case.model.attn_tp_size), case.model.num_heads)


def _dequantize_sentence(case: _Case, route: Route) -> str:
    model = case.model
    if not model.fp8_cache:
        return f"the {model.kv_layout} cache needs none"
    if route.attention is Attention.MHA_ONE_SHOT:
        if route.dequantize_kv:
            return f"older keys of a prefix come from the {model.kv_layout} cache, and dense attention reads bf16"
        return "no request has a prefix, so every key comes from this batch"
    if route.dequantize_kv:
        return f"{route.library}'s prefill kernel reads bf16 rows only"
    return f"{route.library}'s kernel reads {model.kv_layout} itself"


# ---------------------------------------------------------------------------------------------------
# The indexer


def _indexer(case: _Case, attention_provider: str, reasons: dict[str, str]) -> IndexerPlan:
    provider = _indexer_provider(case, attention_provider, reasons)
    rows, reasons["indexer.rows_per_chunk"] = _rows_per_chunk(case)
    metadata, reasons["indexer.metadata_provider"] = _metadata_provider(case, provider)
    reasons["indexer"] = f"{case.model.index_topk} tokens are selected for each of {case.batch.num_tokens} query rows"
    return IndexerPlan(
        mode=IndexerMode.TOPK, provider=provider, rows_per_chunk=rows, metadata_provider=metadata
    )


def _indexer_provider(case: _Case, attention_provider: str, reasons: dict[str, str]) -> str:
    """The library of logits and top-k.

    Raises:
        NoProviderError: none is installed that takes the model's indexer.
    """
    model, device = case.model, case.device
    refused: list[str] = []
    for library in ("deep_gemm", "triton", "reference"):
        entry = device.libraries.get(library)
        capability = device.capability(library, Op.INDEXER_TOPK)
        if entry is None or not entry.available:
            refusal: str | None = entry.reason if entry else "not known to this device profile"
        elif capability is None:
            refusal = f"no {Op.INDEXER_TOPK} kernel on {device.where}"
        elif library == "reference" and device.kind != "cpu" and attention_provider != "reference":
            refusal = "plain torch, taken on a GPU only beside a reference attention that a setting asks for"
        elif capability.heads_given(model.index_n_heads) != model.index_n_heads:
            # Padding the indexer's heads would need zero weights for them; no provider here does that.
            counts = " or ".join(map(str, capability.head_counts))
            refusal = f"takes {counts} indexer heads; the model has {model.index_n_heads}"
        else:
            refusal = capability_refusal(
                capability, heads=model.index_n_heads, rows=case.batch.num_tokens, dims=(model.index_head_dim,)
            )
        if refusal is None:
            reasons["indexer.provider"] = f"{library} is the first that scores {model.index_n_heads} indexer heads" + (
                f"; better ones refused: {'; '.join(refused)}" if refused and device.kind != "cpu" else ""
            )
            return library
        refused.append(f"{library}: {refusal}")
    raise NoProviderError(
        f"no installed kernel library selects tokens for {model.index_n_heads} indexer heads of "
        f"{model.index_head_dim} elements on {device.where}: " + "; ".join(refused)
    )


def _rows_per_chunk(case: _Case) -> tuple[int, str]:
    """(query rows whose float32 logits are held at once; why). sglang #13646; vLLM budgets prefill only."""
    batch, device, settings = case.batch, case.device, case.settings
    columns = batch.max_kv_len if case.model.family == "v3.2" else -(-batch.max_kv_len // V4_COMPRESSION)
    row_bytes = LOGIT_BYTES * max(columns, 1)
    asked, quarter = settings.logits_budget_mb * MIB, device.memory_free // 4
    budget = min(asked, quarter)
    source = "logits_budget_mb" if asked <= quarter else "a quarter of the free memory"
    limit = f"{budget / MIB:.0f} MiB ({source})"
    rows = budget // row_bytes
    if rows >= batch.num_tokens:
        return batch.num_tokens, f"all {batch.num_tokens} rows of {row_bytes} B of logits fit {limit}"
    if rows == 0:
        return 1, f"one row of logits takes {row_bytes} B, more than {limit}; it goes row by row"
    # Few distinct row counts, so that shape-specialised kernels are not rebuilt for every batch.
    bucket = 1 << (rows.bit_length() - 1)
    return bucket, f"{rows} rows of {row_bytes} B of logits fit {limit}, rounded down to a power of two"


def _metadata_provider(case: _Case, provider: str) -> tuple[str, str]:
    """(library of the paged logits' scheduling metadata or "", why)."""
    batch, device = case.batch, case.device
    if provider != "deep_gemm":
        return "", f"{provider} needs no scheduling metadata"
    if case.model.family == "v3.2" and batch.phase is Phase.EXTEND:
        return "", "a prefill's logits are ragged, not paged"
    capability = device.capability("deep_gemm", Op.INDEXER_METADATA)
    limit = capability.max_rows if capability else 0
    if limit is None or batch.num_tokens <= limit:
        return "deep_gemm", f"{batch.num_tokens} rows are within what the installed DeepGEMM schedules"
    library = "triton" if device.has("triton", Op.INDEXER_METADATA) else "reference"
    return library, f"{batch.num_tokens} rows exceed the {limit} that the installed DeepGEMM schedules on this device"


# ---------------------------------------------------------------------------------------------------
# Plans


def _phase_sentence(batch: BatchShape) -> str:
    return (
        f"{batch.phase} of {batch.num_requests} requests, {batch.num_tokens} query rows, "
        f"longest context {batch.max_kv_len} of {batch.total_kv_len} tokens"
    )


_NOTHING = "there are no query rows"


def _idle_plan(batch: BatchShape, reasons: dict[str, str]) -> Plan:
    fields = ("attention", "provider", "dequantize_kv", "head_padding", "token_shard", "indexer")
    inner = ("indexer.provider", "indexer.rows_per_chunk", "indexer.metadata_provider")
    return Plan(
        phase=batch.phase,
        attention=Attention.NONE,
        provider="",
        indexer=IndexerPlan(mode=IndexerMode.NONE),
        reasons=reasons | dict.fromkeys(fields + inner, _NOTHING),
    )


def _dense_plan(case: _Case, route: Route, refused: Sequence[Refusal], reasons: dict[str, str]) -> Plan:
    batch, limit = case.batch, _mha_limit(case.model, case.settings)
    route = replace(route, dequantize_kv=case.model.fp8_cache and batch.has_prefix)
    nothing = "every token is attended, so nothing is selected"
    reasons |= {
        "attention": f"every context, the longest of {batch.max_kv_len} tokens, is within mha_max_kv {limit}",
        "provider": _provider_sentence(case, route, refused, "auto"),
        "dequantize_kv": _dequantize_sentence(case, route),
        "head_padding": "dense attention takes any head count",
        "token_shard": "dense attention pads no heads",
        "indexer": f"the keys are stored for later; {nothing}",
        "indexer.provider": nothing,
        "indexer.rows_per_chunk": nothing,
        "indexer.metadata_provider": nothing,
    }
    return Plan(
        phase=batch.phase,
        attention=route.attention,
        provider=route.library,
        dequantize_kv=route.dequantize_kv,
        indexer=IndexerPlan(mode=IndexerMode.STORE_ONLY),
        reasons=reasons,
    )


def _sparse_plan(case: _Case, not_dense: str, reasons: dict[str, str]) -> Plan:
    load = case.own_load
    route, refused = _pick_sparse(case, load)
    token_shard, reasons["token_shard"] = _token_shard(case, route)
    if token_shard:
        load = _sharded(case)
        route, refused = _pick_sparse(case, load)
    head_padding, reasons["head_padding"] = _head_padding(case, route, load.heads)
    reasons["attention"] = f"not dense: {not_dense}; {_attention_sentence(case, route, load)}"
    skipped = [refusal for refusal in refused if refusal.route.library == route.library]
    if skipped:
        reasons["attention"] += "; refused: " + "; ".join(map(str, skipped))
    reasons["provider"] = _provider_sentence(case, route, refused, case.asked)
    reasons["dequantize_kv"] = _dequantize_sentence(case, route)
    indexer = _indexer(case, route.library, reasons)
    return Plan(
        phase=case.batch.phase,
        attention=route.attention,
        provider=route.library,
        dequantize_kv=route.dequantize_kv,
        head_padding=head_padding,
        token_shard=token_shard,
        indexer=indexer,
        reasons=reasons,
    )


def _split_dense(
    case: _Case, live: Sequence[int], kv_lens: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """(groups of requests that run dense, those that run sparse)."""
    limit, workspace = _mha_limit(case.model, case.settings), case.batch.attention_workspace_tokens
    route, _ = _first(dense_routes(), lambda route: case.refusal(route, case.own_load, "auto"))
    if route is None or _dense_ruled_out(case):
        return [], list(live)
    dense: list[list[int]] = []
    sparse: list[int] = []
    held = 0
    for request in live:
        tokens = kv_lens[request]
        if tokens > limit or 0 < workspace < tokens:
            sparse.append(request)
        elif dense and (not workspace or held + tokens <= workspace):
            dense[-1].append(request)
            held += tokens
        else:
            dense.append([request])
            held = tokens
    return dense, sparse
