"""Which CUDA kernel a call gets, what the kernel of many heads refuses, and what fits."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.kernels.cuda import (
    attention,
    sparse_mla,
    sparse_mla_copy,
    sparse_mla_launch,
    sparse_mla_neighbours,
    sparse_mla_rows,
    sparse_mla_wide,
)
from nsa_plugin.kernels.kv_cache import allocate_cache
from nsa_plugin.kernels.sparse_mla import prefill_op
from nsa_plugin.kernels.triton.device import DeviceFacts
from nsa_plugin.layouts import BF16, V4_FP8, V32_FP8
from nsa_plugin.libraries.architectures import shared_memory_per_block
from tests.kernels.sparse_mla_cases import HOST_TOKENS, facts_of, host_arguments

HEADS = 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "q is on cpu; the CUDA kernel needs a CUDA device"),
        ({"q": torch.zeros(HOST_TOKENS, HEADS, 576)}, "q has dtype float32; allowed: bfloat16"),
        ({"kv": torch.zeros(128, 576, dtype=torch.bfloat16)}, "kv has layout bf16; this kernel reads v32_fp8"),
        ({"d_v": 256}, "d_v is 256; this kernel has values of 512"),
        (
            {
                "extra_kv": allocate_cache("v32_fp8", 1, 64),
                "extra_indices": torch.zeros(HOST_TOKENS, 4, dtype=torch.int32),
            },
            "an extra cache is given; this kernel reads one",
        ),
    ],
)
def test_what_is_refused_and_by_which_name(changes, message):
    with pytest.raises(KernelArgumentError, match=message):
        prefill_op(sparse_mla_wide.attend)(**host_arguments(HEADS, **changes))


@pytest.mark.parametrize(
    ("heads", "rows", "suits", "chosen"),
    [
        (16, 4096, True, "few"),
        (17, 4096, True, "many"),
        (32, 132, True, "many"),
        (32, 131, True, "few"),
        (64, 131, True, "few"),
        (128, 66, True, "many"),
        (128, 65, True, "few"),
        (64, 4096, False, "few"),
        (64, 0, True, "few"),
    ],
)
def test_which_kernel_a_call_gets(monkeypatch, heads, rows, suits, chosen):
    loaded = []
    monkeypatch.setattr(sparse_mla, "attend", lambda call: "few")
    monkeypatch.setattr(sparse_mla_wide, "attend", lambda call: "many")
    monkeypatch.setattr(attention, "suits_hopper", lambda call: suits)
    monkeypatch.setattr(sparse_mla_wide, "kernel", lambda heads, device: loaded.append(heads))
    monkeypatch.setattr(attention, "facts_of", lambda device: DeviceFacts(132, 90, shared_memory_per_block(90)))
    monkeypatch.setattr(torch.cuda, "device_of", lambda q: torch.no_grad())
    scope = SimpleNamespace(cache=SimpleNamespace(layout=V32_FP8))
    call = SimpleNamespace(heads=heads, rows=rows, q=torch.zeros(1), scopes=(scope,))
    assert attention.attend_prefill(call) == chosen
    # Compiled by the first batch that might have a larger one behind it.
    assert loaded == ([sparse_mla_wide.heads_of_block(heads)] if suits and rows and heads > 16 else [])


@pytest.mark.parametrize(
    ("architecture", "rows", "suits", "chosen"),
    [
        (90, 4096, True, "neighbours"),
        (90, 4095, True, "alone"),
        (90, 4096, False, "alone"),
        (90, 0, True, "alone"),
        (86, 1024, True, "neighbours"),
        (86, 1023, True, "alone"),
    ],
)
def test_long_prefills_of_few_heads_let_the_gpu_decide(monkeypatch, architecture, rows, suits, chosen):
    loaded = []
    monkeypatch.setattr(sparse_mla_neighbours, "facts_of", lambda device: facts_of(architecture))
    monkeypatch.setattr(sparse_mla, "attend", lambda call: "alone")
    monkeypatch.setattr(sparse_mla_neighbours, "attend", lambda call: "neighbours")
    monkeypatch.setattr(sparse_mla_neighbours, "suits", lambda call: suits)
    monkeypatch.setattr(sparse_mla_neighbours, "load", loaded.append)
    call = SimpleNamespace(heads=8, rows=rows, q=torch.zeros(1), scopes=(scope(),))
    assert attention.attend_prefill(call) == chosen
    # Compiled by the first batch that might have a longer one behind it.
    assert loaded == ([call] if suits and rows else [])


@pytest.mark.parametrize(
    ("rows", "suits", "chosen"),
    [(512, True, "copy"), (511, True, "records"), (512, False, "records"), (0, True, "records")],
)
def test_long_prefills_of_many_heads_attend_a_copy(monkeypatch, rows, suits, chosen):
    loaded = []
    monkeypatch.setattr(sparse_mla, "attend", lambda call: "records")
    monkeypatch.setattr(sparse_mla_copy, "attend", lambda call: "copy")
    monkeypatch.setattr(sparse_mla_copy, "suits", lambda call: suits)
    monkeypatch.setattr(sparse_mla_copy, "load", loaded.append)
    call = SimpleNamespace(heads=64, rows=rows, q=torch.zeros(1), scopes=(scope(),))
    assert attention.attend_prefill(call) == chosen
    # Compiled by the first batch that might have a longer one behind it.
    assert loaded == ([call] if suits and rows else [])


def scope(topk=2048, layout=V32_FP8, slots=64, page_size=64):
    cache = SimpleNamespace(layout=layout, num_slots=slots, page_size=page_size, num_pages=slots // page_size)
    return SimpleNamespace(cache=cache, topk=topk)


@pytest.mark.parametrize(
    ("changes", "architecture", "suits"),
    [
        ({}, 86, True),
        ({}, 120, True),
        ({}, 90, False),
        ({"heads": 32}, 86, False),
        ({"heads": 33}, 86, True),
        ({"heads": 128}, 86, True),
        ({"scopes": (scope(topk=0),)}, 86, False),
        ({"scopes": (scope(slots=0),)}, 86, False),
        ({"scopes": (scope(slots=2**18, page_size=1),)}, 86, True),
        ({"scopes": (scope(slots=2**18 + 1, page_size=1),)}, 86, False),  # more pages than a block has bits for
        ({"scopes": (scope(slots=2**17, page_size=65536),)}, 86, True),
        ({"scopes": (scope(slots=2**18, page_size=65537),)}, 86, False),  # not even one page fits
        ({"scopes": (scope(), scope())}, 86, False),
        ({"scopes": (scope(layout=V4_FP8),)}, 86, False),
        ({"out_dtype": torch.float32}, 86, False),
    ],
)
def test_which_calls_suit_a_copy(monkeypatch, changes, architecture, suits):
    monkeypatch.setattr(sparse_mla_copy, "facts_of", lambda device: facts_of(architecture))
    q = SimpleNamespace(is_cuda=True, device="cuda")
    given = {"heads": 64, "q": q, "scopes": (scope(),), "d_v": 512, "out_dtype": torch.bfloat16} | changes
    assert sparse_mla_copy.suits(SimpleNamespace(**given)) is suits


def test_there_is_no_copy_where_the_l2_cache_is_small(monkeypatch):
    """That of an A10, A40 or RTX 3090 has 6 MiB, an A100's 40, an H200's 50 or more."""
    q = SimpleNamespace(is_cuda=True, device="cuda")
    call = SimpleNamespace(heads=64, q=q, scopes=(scope(),), d_v=512, out_dtype=torch.bfloat16)
    for mib, suits in ((0, False), (6, False), (35, False), (36, True), (40, True)):
        monkeypatch.setattr(
            sparse_mla_copy, "facts_of", lambda device, mib=mib: facts_of(86)._replace(l2_cache=mib << 20)
        )
        assert sparse_mla_copy.suits(call) is suits


def test_the_host_and_the_source_of_a_copy_agree():
    folder = Path(sparse_mla.__file__).parent
    source, bits = (folder / sparse_mla_copy.SOURCE).read_text(), (folder / "sparse_mla_code_bits.cuh").read_text()
    assert (int(re.search(r"THREADS = (\d+);", source)[1]), 1, 1) == sparse_mla_copy.THREADS
    assert f"ROW = {sparse_mla_rows.ROW_BYTES};" in source
    assert f"RECORD = {V32_FP8.row_bytes};" in bits


def test_a_copy_is_refused_on_sm90_and_where_no_page_fits(monkeypatch):
    monkeypatch.setattr(sparse_mla_copy, "require_records", lambda call: call.scopes[0])
    monkeypatch.setattr(sparse_mla_copy, "facts_of", lambda device: facts_of(90))
    with pytest.raises(KernelArgumentError, match="the device is SM90; this kernel is for other GPUs"):
        sparse_mla_copy.prefill(**host_arguments(HEADS))
    monkeypatch.setattr(sparse_mla_copy, "facts_of", lambda device: facts_of(86))
    given = host_arguments(HEADS)
    pages, size = given["kv"].num_pages, given["kv"].page_size
    message = (
        f"kv has {pages} pages of {size}; a copy is of up to 262144 pages in the cache, and of up to {size - 1} rows"
    )
    with pytest.raises(KernelArgumentError, match=message):
        sparse_mla_copy.prefill(**given, most_rows=size - 1)


@pytest.mark.parametrize(
    ("changes", "architecture", "suits"),
    [
        ({}, 90, True),
        ({"heads": 9}, 90, False),
        ({}, 86, True),
        ({"heads": 16}, 86, True),
        ({"heads": 17}, 86, False),
        ({"scopes": (scope(topk=2048),)}, 86, True),
        ({"scopes": (scope(topk=0),)}, 86, False),
        ({"scopes": (scope(topk=2049),)}, 86, False),
        ({"heads": 16, "scopes": (scope(topk=4096),)}, 86, True),
        ({"q": SimpleNamespace(is_cuda=False)}, 90, False),
        ({"scopes": (scope(), scope())}, 90, False),
        ({"scopes": (scope(layout=V4_FP8),)}, 90, False),
        ({"scopes": (scope(topk=8193),)}, 90, False),
        ({"scopes": (scope(slots=2**28 - 1),)}, 90, False),
        ({"d_v": 256}, 90, False),
        ({"out_dtype": torch.float32}, 90, False),
    ],
)
def test_which_calls_suit_unions_that_the_gpu_decides_on(monkeypatch, changes, architecture, suits):
    facts = DeviceFacts(132, architecture, shared_memory_per_block(architecture))
    monkeypatch.setattr(sparse_mla_neighbours, "facts_of", lambda device: facts)
    q = SimpleNamespace(is_cuda=True, device="cuda")
    given = {"heads": 8, "q": q, "scopes": (scope(),), "d_v": 512, "out_dtype": torch.bfloat16} | changes
    assert sparse_mla_neighbours.suits(SimpleNamespace(**given)) is suits


@pytest.mark.parametrize(
    ("changes", "architecture", "suits"),
    [({}, 90, True), ({}, 86, False), ({}, 120, False), ({"scopes": (scope(layout=V4_FP8),)}, 90, False)],
)
def test_which_calls_suit_a_kernel_of_sm90(monkeypatch, changes, architecture, suits):
    facts = DeviceFacts(132, architecture, shared_memory_per_block(architecture))
    monkeypatch.setattr(sparse_mla_launch, "facts_of", lambda device: facts)
    q = SimpleNamespace(is_cuda=True, device="cuda")
    given = {"q": q, "scopes": (scope(),), "d_v": 512, "out_dtype": torch.bfloat16} | changes
    assert sparse_mla_launch.suits_hopper(SimpleNamespace(**given)) is suits


def test_a_kernel_of_sm90_refuses_another_gpu(monkeypatch):
    facts = DeviceFacts(132, 86, shared_memory_per_block(86))
    monkeypatch.setattr(sparse_mla_launch, "facts_of", lambda device: facts)
    monkeypatch.setattr(sparse_mla_launch, "require_records", lambda call: call.scopes[0])
    with pytest.raises(KernelArgumentError, match="the device is SM86; this kernel needs SM90"):
        prefill_op(sparse_mla_wide.attend)(**host_arguments(HEADS))


def test_the_kernel_is_that_of_the_layout(monkeypatch):
    monkeypatch.setattr(sparse_mla, "attend", lambda call: "records")
    monkeypatch.setattr(sparse_mla_rows, "attend", lambda call: "rows")
    for layout, kernel in ((V32_FP8, "records"), (V4_FP8, "records"), (BF16, "rows")):
        scope = SimpleNamespace(cache=SimpleNamespace(layout=layout))
        call = SimpleNamespace(heads=16, rows=4, q=torch.zeros(1), scopes=(scope,))
        assert attention.attend_prefill(call) == kernel
        assert attention.attend_decode(call) == kernel


@pytest.mark.parametrize("heads", sparse_mla_wide.HEADS)
def test_a_block_fits_into_shared_memory_and_registers(heads):
    assert sparse_mla_wide.shared_bytes(heads) <= shared_memory_per_block(90)
    assert sparse_mla_wide.block(heads)[0] == 128 * (1 + 2 + sparse_mla_wide.LOGITS[heads])


def test_arguments_are_those_of_the_source():
    source = (Path(sparse_mla.__file__).parent / sparse_mla_wide.SOURCE).read_text()
    body = re.search(r"struct Arguments \{(.*?)\};", source, re.DOTALL)[1]
    declared = re.sub(r"//[^\n]*", "", body)
    kinds = {"int": 4, "float": 4, "i64": 8, "Scope": ctypes.sizeof(sparse_mla_launch.CudaScope)}
    found = []
    for line in filter(None, map(str.strip, declared.split(";"))):
        pointer = "*" in line
        kind, names = line.replace("const ", "").split(" ", 1)
        found += [(name.strip("* "), 8 if pointer else kinds[kind]) for name in names.split(",")]
    fields = [
        (name, getattr(sparse_mla_wide.WideArguments, name).size) for name, _ in sparse_mla_wide.WideArguments._fields_
    ]
    assert found == fields
