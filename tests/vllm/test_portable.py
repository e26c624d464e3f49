"""The portable path's norms, RoPE and queries against the Triton kernels of the installed vLLM, interpreted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import inspect
import itertools
import torch, triton, triton.language as tl
import vllm.triton_utils as utils
utils.tl, utils.triton = tl, triton  # vLLM replaces both on a CPU
from types import SimpleNamespace
from vllm.models.deepseek_v32 import attention
from vllm.models.deepseek_v32.common import kernels
from nsa_plugin.backends.common.providers import Providers
from nsa_plugin.backends.vllm.v32 import patches, portable
from nsa_plugin.kernels.kv_cache import open_cache, reference_read, reference_read_codes

assert attention.fused_norm_rope is kernels.fused_norm_rope and attention.fused_q is kernels.fused_q
NORM_ROPE = inspect.signature(kernels.fused_norm_rope).parameters
generator = torch.Generator().manual_seed(3)
ROWS, HEADS, INDEX_HEADS = 7, 4, 8

def random(*shape, dtype=torch.bfloat16):
    wide = torch.randn((*shape[:-1], shape[-1] + 16), generator=generator).to(dtype)
    return wide[..., 8:8 + shape[-1]]  # strided, as the parts of a projection are

angles = torch.arange(100)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
positions = torch.tensor([0, 5, 9, 33, 99, 2, 1])
slots = torch.tensor([0, 70, 3, -1, 255, 130, 64])

def close(one, other, steps, wrong=0.0):
    # The interpreter cuts bits off where it stores bfloat16, and so does not round as a GPU does. Where it converts to
    # fp8, it loses the carry into the exponent: some values are half of what they should be.
    right = torch.isclose(one.float(), other.float(), rtol=steps * 2.0 ** -8, atol=1e-6)
    assert one.numel() == 0 or float((~right).float().mean()) <= wrong, (one[~right][:5], other[~right][:5])

def called(name, layout, sm, *args, **kwargs):
    original = getattr(kernels, name)
    serving = SimpleNamespace(
        planning=lambda: SimpleNamespace(device=SimpleNamespace(sm=sm)),
        loaded=lambda: Providers(layout, 0, helpers="triton"),
    )
    patches.serving = lambda: serving
    return getattr(patches, name)(original)(*args, **kwargs)

def run(sm, interleaved, layout, has_indexer, with_caches):
    generator.manual_seed(5)
    page = torch.uint8 if layout == "v32_fp8" else torch.bfloat16
    main = torch.zeros(4, 64, 656 if layout == "v32_fp8" else 576, dtype=page)
    keys = torch.zeros(4, 64, 132, dtype=torch.uint8)
    buffer = torch.full((9, 2048), 7, dtype=torch.int32)
    norm = dict(q=random(96), kv=random(512), w=torch.rand(128, generator=generator), b=torch.rand(128))
    torch.manual_seed(1)
    given = (positions, random(ROWS, 96), norm["q"].contiguous(), 1e-6, random(ROWS, 512),
             norm["kv"].contiguous(), 1e-5, random(ROWS, 64), cos_sin, random(ROWS, 128) if has_indexer else None,
             norm["w"] if has_indexer else None, torch.ones(128) if has_indexer else None, 1e-6,
             cos_sin if has_indexer else None, buffer)
    outs = dict(kv_c_out=torch.zeros(ROWS, 512).bfloat16(), k_pe_out=torch.zeros(ROWS, 64).bfloat16())
    outs = {name: out for name, out in outs.items() if name in NORM_ROPE}  # none in 0.28
    caches = dict(slot_mapping=slots, mla_kv_cache=main) if with_caches else {}
    if with_caches and has_indexer:
        caches["indexer_k_cache"] = keys
    dtype = "fp8_ds_mla" if layout == "v32_fp8" else "bfloat16"
    q = called("fused_norm_rope", layout, sm, *given, mla_kv_cache_dtype=dtype, has_indexer=has_indexer,
             index_rope_interleave=interleaved, **outs, **caches)
    found = called("fused_q", layout, sm, positions, random(ROWS, HEADS, 64), cos_sin,
                 random(ROWS, INDEX_HEADS, 128) if has_indexer else None, cos_sin if has_indexer else None,
                 random(ROWS, HEADS, 512), torch.ones(1), random(ROWS, INDEX_HEADS) if has_indexer else None, 0.1, 0.2,
                 has_indexer=has_indexer, index_rope_interleave=interleaved, quantize_mqa=False)
    return q, outs, open_cache(main, layout), open_cache(keys, "indexer_fp8"), buffer, found

for interleaved, layout, has_indexer, with_caches in itertools.product(
    (False, True), ("v32_fp8", "bf16"), (True, False), (True, False)
):
    case = interleaved, layout, has_indexer, with_caches
    theirs, ours = run(89, *case), run(86, *case)
    every = torch.arange(256)
    live = slots >= 0 if with_caches else torch.ones(ROWS, dtype=torch.bool)
    # vLLM 0.28 norms no query of a token without a slot.
    queries = torch.ones(ROWS, dtype=torch.bool) if ours[1] else live & with_caches
    close(ours[0][queries], theirs[0][queries], 2)
    for name in ours[1]:
        close(ours[1][name][live], theirs[1][name][live], 2)
    main = [reference_read(one[2], every, dtype=torch.float32) for one in (ours, theirs)]
    assert bool(main[0].any()) == with_caches, case
    close(main[0][slots[slots >= 0]], main[1][slots[slots >= 0]], 34, wrong=0.06)
    if layout == "v32_fp8":  # the scales: powers of two from 0.31 on, before that as exact as bfloat16 is
        scales = [one[2].data.view(-1, 656)[slots[slots >= 0], 512:528] for one in (ours, theirs)]
        if portable.rounds_scales():
            assert torch.equal(*scales), case
        else:
            close(*[one.contiguous().view(torch.float32) for one in scales], 2)
    rest = torch.ones(256, dtype=torch.bool).index_fill(0, slots[slots >= 0], False)
    assert not main[0][rest].any()
    stored = [reference_read_codes(one[3], every) for one in (ours, theirs)]
    assert bool(stored[0][0].view(torch.uint8).any()) == (with_caches and has_indexer), case
    assert torch.equal(stored[0][1], stored[1][1]), case
    close(stored[0][0], stored[1][0], 34, wrong=0.06)
    assert torch.equal(ours[4], theirs[4]), case
    close(ours[5][2], theirs[5][2], 2)
    if has_indexer:
        close(ours[5][0], theirs[5][0], 34, wrong=0.06)
        close(ours[5][1], theirs[5][1], 1)

import vllm
from packaging.version import Version
asked = []
keys = patches.pack_warmup_keys(lambda kernel, **given: asked.append(given) or ["a key"])
fp8 = torch.float8_e4m3fn
for sm, dtype, expected in ((86, fp8, []), (89, fp8, ["a key"]), (86, torch.uint8, ["a key"])):
    if Version(vllm.__version__) >= Version("0.30"):  # vLLM warms it up from then on
        from vllm.v1.attention.ops.common import PackSeqTritonKernel
        patches.serving = lambda: SimpleNamespace(planning=lambda: SimpleNamespace(device=SimpleNamespace(sm=sm)))
        assert keys(PackSeqTritonKernel, dtype=dtype, pad_value=0) == expected
print("all agree")
"""


@pytest.mark.engine_vllm
def test_the_portable_kernels_agree_with_vllms():
    """Run in a separate process, which interprets vLLM's kernels."""
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=900)
    assert "all agree" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]
