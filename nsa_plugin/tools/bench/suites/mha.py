"""Workloads of a short prefill of one request: dense attention, and sparse attention of the same tokens.

Both are timed from queries and keys on. What the engine must compute around each is a separate field: dense attention
needs every head's keys and values from the latent rows (`up_projection_us`), sparse attention needs the queries
projected into the latent space and its output projected back (`absorb_us`).
"""

from __future__ import annotations

import torch

from nsa_plugin.kernels.mha import reference
from nsa_plugin.kernels.sparse_mla import reference_prefill
from nsa_plugin.tools.bench import floors, inputs, judges, stock
from nsa_plugin.tools.bench.cases import BenchCase
from nsa_plugin.tools.bench.judges import Attended
from nsa_plugin.tools.bench.suites.sparse_mla import D_V, PADDED, PAGE_SIZE, bf16_rows, gather
from nsa_plugin.tools.bench.workload import Contender, Context, TimedCall, Workload, into

SDPA = "torch SDPA"
SPARSE = "sparse_mla {}"

# DeepSeek-V3.2's head: nope 128 + rope 64, values 128, latent rows of 512 + rope.
NOPE_DIM, ROPE_DIM, V_DIM, LATENT_DIM = 128, 64, 128, 512
_LAYOUT = "v32_fp8"
_SAMPLED_ROWS = 24


def one_shot(case: BenchCase, context: Context) -> Workload:
    device = context.device
    heads, tokens, topk = case.numbers("heads", "q", "topk")
    d_qk = NOPE_DIM + ROPE_DIM
    scale = d_qk**-0.5
    q = inputs.normal(device, 1, tokens, heads, d_qk)
    k = inputs.normal(device, 2, tokens, heads, d_qk)
    v = inputs.normal(device, 3, tokens, heads, V_DIM) / 4
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    rows = inputs.sample(device, tokens, _SAMPLED_ROWS)

    def expected() -> Attended:
        whole = reference(q, k, v, cu_seqlens, cu_seqlens, scale=scale, return_lse=True, out_dtype=torch.float32)
        assert whole.lse is not None
        return Attended(whole.out[rows], whole.lse[rows])

    def sdpa() -> TimedCall:
        by_head = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v)]

        def call() -> Attended:
            attend = torch.nn.functional.scaled_dot_product_attention
            return Attended(attend(*by_head, is_causal=True, scale=scale)[0].transpose(0, 1), None)

        return call

    return Workload(
        work=floors.mha(q=tokens, kv=tokens, heads=heads, d_qk=d_qk, d_v=V_DIM),
        contenders=(
            Contender(SDPA, sdpa, extra_call=_up_projection(device, tokens, heads)),
            *context.contenders(
                "mha_one_shot",
                lambda function: lambda: function(q, k, v, cu_seqlens, cu_seqlens, scale=scale),
                extra_call=_up_projection(device, tokens, heads),
            ),
            *_sparse(context, tokens, heads, topk),
        ),
        judge=judges.attention(rows, expected, judges.MHA_OUT),
        baselines=("fa3", SDPA),
    )


def _sparse(context: Context, tokens: int, heads: int, topk: int) -> list[Contender]:
    """Sparse attention of the same tokens: every key that a query may see, or a random top-k of them."""
    device = context.device
    cache = inputs.filled_cache(device, _LAYOUT, tokens, PAGE_SIZE, 4)
    visible = inputs.generator(device, 5)
    scores = torch.rand(tokens, tokens, generator=visible, device=device)
    scores = scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), -1.0)
    best = scores.topk(min(topk, tokens), dim=1)
    indices = torch.full((tokens, topk), -1, dtype=torch.int32, device=device)
    indices[:, : best.indices.shape[1]] = torch.where(best.values < 0, -1, best.indices).int()
    q = inputs.normal(device, 6, tokens, heads, cache.dim)
    out = torch.empty(tokens, heads, D_V, dtype=torch.bfloat16, device=device)
    scale = (NOPE_DIM + ROPE_DIM) ** -0.5
    rows = inputs.sample(device, tokens, _SAMPLED_ROWS)
    judge = judges.attention(
        rows,
        lambda: reference_prefill(q[rows], cache, indices[rows], scale=scale, out_dtype=torch.float32),
        judges.MHA_OUT,
    )
    work = floors.sparse_mla(
        rows=tokens, heads=heads, d_qk=cache.dim, d_v=D_V, gathers=[gather(indices, cache)], statistics=2
    )
    extra_call = _absorb(device, tokens, heads)
    return [
        Contender(
            SPARSE.format(PADDED),
            lambda: stock.flash_mla_prefill(q, bf16_rows(cache), indices, scale),
            judge,
            extra_call,
            work,
        ),
        *context.contenders(
            "sparse_mla_prefill",
            into(out, q, cache, indices, scale=scale),
            label=SPARSE,
            judge=judge,
            extra_call=extra_call,
            work=work,
        ),
    ]


def _up_projection(device: torch.device, tokens: int, heads: int) -> tuple[str, TimedCall]:
    latent = inputs.normal(device, 7, tokens, LATENT_DIM)
    weight = inputs.normal(device, 8, LATENT_DIM, heads * (NOPE_DIM + V_DIM))
    return "up_projection_us", lambda: latent @ weight


def _absorb(device: torch.device, tokens: int, heads: int) -> tuple[str, TimedCall]:
    nope = inputs.normal(device, 7, heads, tokens, NOPE_DIM)
    into = inputs.normal(device, 8, heads, NOPE_DIM, LATENT_DIM)
    latent = inputs.normal(device, 9, heads, tokens, LATENT_DIM)
    out_of = inputs.normal(device, 10, heads, LATENT_DIM, V_DIM)
    return "absorb_us", lambda: (torch.bmm(nope, into), torch.bmm(latent, out_of))
