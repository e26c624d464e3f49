"""The CUDA kernels for older GPUs, run on a CPU, against the references: `cuda_on_cpu` says how.

A GPU shows more: memory that threads read and write at once, and what a compiler for GPUs makes of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from nsa_plugin.kernels.cuda import (
    attention,
    build,
    sparse_mla,
    sparse_mla_copy,
    sparse_mla_launch,
    sparse_mla_neighbours,
    sparse_mla_rows,
    sparse_mla_union,
    topk,
)
from nsa_plugin.kernels.kv_cache import gather_rows
from nsa_plugin.kernels.sparse_mla import decode_op, prefill_op, reference_decode, reference_prefill
from nsa_plugin.kernels.topk import reference_topk_rows
from tests.kernels import cuda_on_cpu
from tests.kernels.sparse_mla_cases import (
    DECODE_TOLERANCE,
    PREFILL_TOLERANCE,
    decode_case,
    facts_of,
    portable_forms,
    prefill_case,
)

pytestmark = pytest.mark.skipif(
    cuda_on_cpu.COMPILER is None or torch.cuda.is_available(), reason="needs g++, and runs where there is no GPU"
)

MODULES = (sparse_mla_copy, sparse_mla_launch, sparse_mla_neighbours, sparse_mla_union)
CACHED = (
    sparse_mla_copy._load,
    sparse_mla_launch.kernels,
    sparse_mla_launch.nothings,
    sparse_mla_neighbours._load,
    sparse_mla_rows.zeros,
    sparse_mla_union.kernels,
)
EXTRA = ("v4_fp8", 512, 70, 64)


@pytest.fixture(autouse=True)
def run_as(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Runs CUDA kernels on the CPU, as on a GPU of an SM version: SM86 until it is called."""

    def as_sm(sm: int) -> None:
        for module in MODULES:
            monkeypatch.setattr(module, "facts_of", lambda device: facts_of(sm))

    for module in (*MODULES, build):
        monkeypatch.setattr(module, "load_kernel", cuda_on_cpu.load_kernel)
    for module in (sparse_mla_copy, sparse_mla_launch):
        monkeypatch.setattr(module, "compile_together", lambda source, sets: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    as_sm(86)
    for cached in CACHED:
        cached.cache_clear()
    yield as_sm
    for cached in CACHED:
        cached.cache_clear()


def check_decode(attend: Any, layout: str, heads: int, splits: int, seed: int = 0) -> None:
    extra = EXTRA if layout == "v4_fp8" else None
    case = decode_case(layout=layout, batch=4, s_q=1, heads=heads, slots=512, topk=300, extra=extra, seed=seed + heads)
    result = decode_op(attend)(**case, splits=splits)
    expected = reference_decode(**case, out_dtype=torch.float32)
    absolute, relative = DECODE_TOLERANCE
    torch.testing.assert_close(result.out.float(), expected.out, atol=absolute, rtol=relative)
    torch.testing.assert_close(result.lse, expected.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "splits"), [(5, 1), (40, 3)])
@pytest.mark.parametrize(("layout", "variant"), portable_forms(), ids=str)
def test_sparse_mla(layout: str, variant: sparse_mla.Variant, heads: int, splits: int) -> None:
    check_decode(partial(sparse_mla.attend, variant=variant), layout, heads, splits)


AT_ONCE = (
    "DEVICE void copy_16_bytes(u32 destination, const void* source) { started[threadIdx.x].push_back({destination, "
    "source, 16}); }",
    "DEVICE void copy_16_bytes(u32 destination, const void* source) { std::memcpy(shared_pointer(destination), source, "
    "16); }",
)


@pytest.mark.parametrize("edits", [[], [AT_ONCE]], ids=["late copies", "copies at once"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("variant", [*sparse_mla.PORTABLE_VARIANTS, *sparse_mla_rows.PORTABLE_VARIANTS[3:]], ids=str)
def test_stages_that_are_filled_many_times(
    variant: Any, splits: int, edits: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of rows whose last entries do not count. A copy neither comes before what it overwrites was read, nor after
    it is read itself."""
    monkeypatch.setattr(cuda_on_cpu, "edits", edits)
    reads_rows = isinstance(variant, sparse_mla_rows.RowsVariant)
    layout, module = ("bf16", sparse_mla_rows) if reads_rows else ("v32_fp8", sparse_mla)
    heads = 40 if not reads_rows and variant.converts else 9  # each half of the block's warps has some
    case = decode_case(layout=layout, batch=3, s_q=1, heads=heads, slots=1024, topk=700, with_length=False, seed=3)
    for row, end in enumerate((700, 450, 130)):
        case["indices"][row, :, end:] = -1
    result = decode_op(partial(module.attend, variant=variant))(**case, splits=splits)
    expected = reference_decode(**case, out_dtype=torch.float32)
    absolute, relative = DECODE_TOLERANCE
    torch.testing.assert_close(result.out.float(), expected.out, atol=absolute, rtol=relative)


def check_rows_in_turn(attend: Any, layout: str, splits: int, with_length: bool) -> None:
    """Seven rows by two blocks, of many entries, few or none, by their lengths or because the last do not count.

    A row without entries has a query that is not finite.
    """
    extra = ("v4_fp8", 512, 192, 64) if layout == "v4_fp8" else None
    case = decode_case(
        layout=layout,
        batch=7,
        s_q=1,
        heads=13,
        slots=1024,
        topk=448,
        extra=extra,
        with_length=with_length,
        seed=splits,
    )
    indices = case["indices"]
    valid = (indices[5] >= 0) & (indices[5] < 1024)
    some = int(indices[5][valid][0])
    indices[0, :, :-8] = -1
    indices[1] = indices[3] = -1
    indices[1, :, 127] = indices[3, :, -1] = some
    indices[2, :, 100:] = -1
    indices[4, :, 300:] = 1 << 20
    if extra:
        more = case["extra_indices"]
        more[0] = more[1, :, :-1] = more[2, :, :100] = more[2, :, 101:] = more[3, :, 64:] = -1
    if with_length:
        names = [name for name in case if name.endswith("length") and case[name] is not None]
        empty = [row for row in range(7) if not any(int(case[name][row]) for name in names)]
        case["q"][empty] = torch.nan
    result = decode_op(attend)(**case, splits=splits)
    expected = reference_decode(**case, out_dtype=torch.float32)
    absolute, relative = DECODE_TOLERANCE
    torch.testing.assert_close(result.out.float(), expected.out, atol=absolute, rtol=relative)
    torch.testing.assert_close(result.lse, expected.lse, atol=1e-5, rtol=1e-5)


@pytest.fixture
def two_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = facts_of(86)._replace(sms=2)
    monkeypatch.setattr(sparse_mla_launch, "facts_of", lambda device: facts)


IN_TURN = [
    pytest.param(
        partial(module.attend, variant=variant), layout, id=f"{layout}, {variant.heads} heads, {variant.warps} warps"
    )
    for module, layouts in ((sparse_mla, ("v32_fp8", "v4_fp8")), (sparse_mla_rows, ("bf16",)))
    for variant in module.PORTABLE_VARIANTS
    if variant.in_turn
    for layout in layouts
    if module is sparse_mla_rows or variant.takes(layout)
]


@pytest.mark.parametrize("with_length", [True, False])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("attend", "layout"), IN_TURN)
@pytest.mark.usefixtures("two_sms")
def test_rows_in_turn(attend: Any, layout: str, splits: int, with_length: bool) -> None:
    check_rows_in_turn(attend, layout, splits, with_length)


FAULTS_BETWEEN_ROWS = {
    "stages that are read": [
        AT_ONCE,
        ("if (round) barrier_wait(shared_address(&shared.empty[stage]), round - 1 & 1);", ""),
    ],
    "too early an end": [("is_last = block + 1 >= end;", "is_last = block + 2 >= end;")],
    "half a block": [("for (int k = 0; k < KEYS / 32; ++k) some |=", "for (int k = 0; k < 1; ++k) some |=")],
    "half of the readers": [("w < PRODUCERS; ++w) last = max", "w < 1; ++w) last = max")],
    "too few arrivals": [("32 * COPIERS + (WRITES ? COPIERS : 0);", "32 * COPIERS;")],
    "the query of a row without entries": [("is_last = is_empty;\n", "is_last = is_empty = false;\n")],
    "the query before": [
        ("own.first_row += gridDim.x;\n        if (own", "own.first_row += gridDim.x;\n        if (false && own")
    ],
    "a query not measured": [("meet();\n        Query query;", "Query query;")],
    "a query not kept": [("lane);\n        meet();\n        float o", "lane);\n        float o")],
}


@pytest.mark.parametrize("fault", FAULTS_BETWEEN_ROWS)
@pytest.mark.usefixtures("two_sms")
def test_a_fault_between_rows_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_on_cpu, "edits", FAULTS_BETWEEN_ROWS[fault])
    # V3.2's form takes 32 keys at a time, of which this fault leaves none out; V4's takes 64, and V3.2 may use it.
    keys = 64 if fault == "half a block" else 32
    variant = next(one for one in sparse_mla.PORTABLE_VARIANTS if one.in_turn and one.keys == keys)
    attend = partial(sparse_mla.attend, variant=variant)

    def check() -> None:
        for splits, with_length in product((1, 2), (False, True)):
            check_rows_in_turn(attend, "v32_fp8", splits, with_length)

    with pytest.raises(AssertionError, match=r"not close|wait for each other"):
        check()


@pytest.mark.parametrize(("layout", "variant"), portable_forms(), ids=str)
def test_sparse_mla_with_conversions_of_fp8(
    layout: str, variant: sparse_mla.Variant, run_as: Callable[[int], None]
) -> None:
    run_as(89)
    check_decode(partial(sparse_mla.attend, variant=variant), layout, 16, 2)


@pytest.mark.parametrize(("heads", "splits"), [(5, 1), (40, 3)])
@pytest.mark.parametrize("variant", sparse_mla_rows.PORTABLE_VARIANTS, ids=str)
def test_sparse_mla_over_rows(variant: sparse_mla_rows.RowsVariant, heads: int, splits: int) -> None:
    check_decode(partial(sparse_mla_rows.attend, variant=variant), "bf16", heads, splits)


@pytest.mark.parametrize(
    ("attend", "heads"),
    [
        (sparse_mla_neighbours.prefill, 7),
        (sparse_mla_neighbours.prefill, 16),
        (sparse_mla_union.prefill, 7),
        (sparse_mla_union.prefill, 16),
        (sparse_mla_union.prefill, 30),  # two groups of heads
    ],
)
@pytest.mark.parametrize("sharing", [True, False])
def test_unions_of_neighbouring_tokens(attend: Any, sharing: bool, heads: int) -> None:
    """Also a last group that has fewer tokens."""
    case = prefill_case(
        tokens=6, heads=heads, slots=512, topk=150, layout="v32_fp8", with_length=False, with_sink=False
    )
    if sharing:
        case["indices"] = case["indices"][[0, 1, 2, 2, 4, 4]]
    result = attend(**case, out_dtype=torch.bfloat16)
    expected = reference_prefill(**case, out_dtype=torch.float32)
    absolute, relative = PREFILL_TOLERANCE
    torch.testing.assert_close(result.out.float(), expected.out, atol=absolute, rtol=relative)


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("sharing", [True, False])
def test_unions_are_taken_where_neighbours_share(sharing: bool, heads: int) -> None:
    """Of both kernels one runs: the results are, to the bit, those of unions or those of tokens alone."""
    case = prefill_case(
        tokens=8, heads=heads, slots=512, topk=150, layout="v32_fp8", with_length=False, with_sink=False
    )
    if sharing:
        case["indices"] = case["indices"][[0, 0, 0, 0, 4, 4, 4, 4]]
    variant = sparse_mla_neighbours.alone(heads, facts_of(86))
    found = sparse_mla_neighbours.prefill(**case, out_dtype=torch.bfloat16)
    united = sparse_mla_union.prefill(**case, out_dtype=torch.bfloat16)
    alone = prefill_op(partial(sparse_mla.attend, variant=variant, splits=1))(**case, out_dtype=torch.bfloat16)
    assert torch.equal(found.lse, (united if sharing else alone).lse)
    assert torch.equal(found.out, (united if sharing else alone).out)
    assert not torch.equal(united.out, alone.out)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN, or of the largest integer, until they are written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def copy_case(heads: int, *, with_length: bool = True, page_size: int = 64, **more: Any) -> dict[str, Any]:
    """Query tokens of a prefill that select from eight pages."""
    given = {"tokens": 6, "topk": 150, "layout": "v32_fp8", "with_sink": with_length} | more
    return prefill_case(heads=heads, slots=8 * page_size, with_length=with_length, page_size=page_size, **given)


@pytest.mark.parametrize("with_length", [True, False])
@pytest.mark.parametrize("page_size", [64, 48])
@pytest.mark.parametrize("heads", [40, 72])
@pytest.mark.parametrize("most_pages", [8, 7])
@pytest.mark.usefixtures("poisoned")
def test_a_copy_is_attended_where_it_has_room(most_pages: int, heads: int, page_size: int, with_length: bool) -> None:
    """Of both kernels one runs: the results are, to the bit, those over bfloat16 rows or those over records."""
    case = copy_case(heads, page_size=page_size, with_length=with_length)
    bf16 = {"out_dtype": torch.bfloat16}
    found = sparse_mla_copy.prefill(**case, **bf16, most_rows=most_pages * page_size)
    expected = reference_prefill(**case, out_dtype=torch.float32)
    absolute, relative = PREFILL_TOLERANCE
    torch.testing.assert_close(found.out.float(), expected.out, atol=absolute, rtol=relative)
    torch.testing.assert_close(found.lse, expected.lse, atol=1e-3, rtol=1e-3)
    variant = sparse_mla_copy.over_records(heads, facts_of(86))
    records = prefill_op(partial(sparse_mla.attend, variant=variant, splits=1))(**case, **bf16)
    copy = case | {"kv": gather_rows(case["kv"], torch.arange(8 * page_size)).bfloat16()}
    form = sparse_mla_copy.over_copy(heads, facts_of(86))
    rows = prefill_op(partial(sparse_mla_rows.attend, variant=form, splits=1))(**copy, **bf16)
    assert torch.equal(found.lse, (rows if most_pages == 8 else records).lse)
    assert torch.equal(found.out, (rows if most_pages == 8 else records).out)
    assert not torch.equal(rows.lse, records.lse)


@pytest.mark.usefixtures("poisoned")
def test_a_copy_of_a_few_of_many_pages() -> None:
    """More pages than a block takes at a time, with a row each; the selected ones just fit, or one does not."""
    pages = 9000
    case = prefill_case(tokens=6, heads=40, slots=pages, topk=150, layout="v32_fp8", page_size=1, with_length=False)
    selected = len(case["indices"][(case["indices"] >= 0) & (case["indices"] < pages)].unique())
    assert pages > 32 * sparse_mla_copy.THREADS[0]
    assert 300 < selected < pages // 10
    found = [sparse_mla_copy.prefill(**case, most_rows=rows) for rows in (selected, selected - 1)]
    copy = case | {"kv": gather_rows(case["kv"], torch.arange(pages)).bfloat16()}
    forms = sparse_mla_copy.over_copy(40, facts_of(86)), sparse_mla_copy.over_records(40, facts_of(86))
    rows = prefill_op(partial(sparse_mla_rows.attend, variant=forms[0], splits=1))(**copy)
    records = prefill_op(partial(sparse_mla.attend, variant=forms[1], splits=1))(**case)
    for one, expected in zip(found, (rows, records), strict=True):
        assert torch.equal(one.out, expected.out)
        assert torch.equal(one.lse, expected.lse)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_of_nan_in_a_copy_is_that_of_the_query_tokens_that_select_it(code: int) -> None:
    case = copy_case(40, with_length=False)
    indices = case["indices"]
    slot = int(indices[3][(indices[3] >= 0) & (indices[3] < 512)][0])
    case["kv"].data[slot // 64, slot % 64 * 656 + 300] = code
    taken = (indices == slot).any(-1)
    out = sparse_mla_copy.prefill(**case).out
    assert out[taken].isnan().all()
    assert not out[~taken].isnan().any()


FAULTS_OF_A_COPY = {
    "a page not marked": ("if (!(own[page / 32] & bit))", "if (page != 3 && !(own[page / 32] & bit))"),
    "the scale of another tile": ("(half * 2 + lane / 16) * 4", "(half * 2) * 4"),
    "values in another order": ("scaled(__byte_perm(even[k], odd[k], 0x5410)", "scaled(even[k]"),
    "no RoPE": ("if (lane < 8) *(uint4*)(row + ROW_ROPE", "if (lane < 7) *(uint4*)(row + ROW_ROPE"),
    "a page left out": ("int records = (most - left) *", "int records = (most - left - 1) *"),
    "another place in the page": ("+ slot - page * scope.page_size;", "+ (slot - page * scope.page_size ^ 1);"),
}
BOTH_KERNELS = ("(__ldg(gate) >= 0) == (GATE == 1)", "true")


@pytest.mark.parametrize("fault", FAULTS_OF_A_COPY)
@pytest.mark.usefixtures("poisoned")
def test_a_fault_in_a_copy_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_a_copy_is_attended_where_it_has_room(8, 40, 64, True)  # with which the other kernels are loaded
    monkeypatch.setattr(cuda_on_cpu, "edits", [FAULTS_OF_A_COPY[fault]])
    with pytest.raises(AssertionError, match=r"not close|assert False"):
        test_a_copy_is_attended_where_it_has_room(8, 40, 64, True)


def test_it_is_noticed_if_records_are_attended_beside_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_on_cpu, "edits", [BOTH_KERNELS])
    with pytest.raises(AssertionError, match="assert False"):
        test_a_copy_is_attended_where_it_has_room(8, 40, 64, True)


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("topk", [0, 150])
def test_prefills_without_tokens_or_entries(tokens: int, topk: int) -> None:
    case = prefill_case(tokens=5, heads=7, slots=512, topk=150, layout="v32_fp8", with_length=False, with_sink=False)
    case |= {"q": case["q"][:tokens], "indices": case["indices"][:tokens, :topk]}
    result = attention.prefill(**case, out_dtype=torch.bfloat16)
    expected = reference_prefill(**case, out_dtype=torch.float32)
    torch.testing.assert_close(result.out.float(), expected.out, atol=PREFILL_TOLERANCE[0], rtol=PREFILL_TOLERANCE[1])
    torch.testing.assert_close(result.lse, expected.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["v32_fp8", "v4_fp8"])
def test_decode_steps_without_query_tokens(layout: str) -> None:
    case = decode_case(layout=layout, batch=3, s_q=1, heads=5, slots=512, topk=130, seed=1)
    case["q"], case["indices"] = case["q"][:, :0], case["indices"][:, :0]
    result = attention.decode(**case)
    assert result.out.shape == reference_decode(**case).out.shape


@pytest.mark.parametrize(("overlap", "least"), [(0.5, 49), (0.5, 51), (1.0, 99), (0.0, 1)])
def test_a_sample_of_pairs_says_whether_they_share_enough(overlap: float, least: int) -> None:
    """Of 40 pairs that share some of 200 entries; by their hashes they seem to share a few more at most."""
    apart = int(200 * (1 - overlap))
    indices = torch.arange(200, dtype=torch.int32).repeat(80, 1)
    indices[1::2, :apart] += 1000
    indices[:, 100] = -1  # which does not count
    shared = 199 - apart if apart <= 100 else 200 - apart
    scope = sparse_mla_launch.CudaScope(
        indices=indices.data_ptr(), indices_stride=200, lengths_divisor=1, num_slots=2000, topk=200
    )
    found = sparse_mla_neighbours.sample(80, scope, least, torch.device("cpu")).item()
    assert found == pytest.approx(40 * (100 * shared - 199 * least), abs=100)
    assert (found >= 0) == (overlap * 100 >= least)


# A form for each way to write a share's output and to read the query.
SHARING = [
    pytest.param(partial(sparse_mla.attend, variant=sparse_mla.PORTABLE_VARIANTS[2]), "v32_fp8", id="records"),
    pytest.param(partial(sparse_mla.attend, variant=sparse_mla.PORTABLE_VARIANTS[4]), "v32_fp8", id="converted"),
    *(
        pytest.param(partial(sparse_mla_rows.attend, variant=variant), "bf16", id=f"rows, {variant.heads} heads")
        for variant in sparse_mla_rows.PORTABLE_VARIANTS[3:]
    ),
]


def check_shares(attend: Any, layout: str, splits: int) -> None:
    case = decode_case(layout=layout, batch=3, s_q=1, heads=17, slots=1024, topk=700, with_length=False, seed=splits)
    case["indices"][1, :, 40:] = -1  # most shares have nothing
    case["indices"][2] = -1
    result = decode_op(attend)(**case, splits=splits, out_dtype=torch.bfloat16)
    expected = reference_decode(**case, out_dtype=torch.float32)
    absolute, relative = DECODE_TOLERANCE
    torch.testing.assert_close(result.out.float(), expected.out, atol=absolute, rtol=relative)
    torch.testing.assert_close(result.lse, expected.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("splits", [2, 4, 7, 16])
@pytest.mark.parametrize(("attend", "layout"), SHARING)
def test_shares_of_a_row_are_added_up(attend: Any, layout: str, splits: int) -> None:
    check_shares(attend, layout, splits)


def check_sizes(attend: Any, layout: str, exponent: int, out_dtype: torch.dtype = torch.bfloat16) -> None:
    cache = {"layout": layout, "slots": 256, "topk": 256, "gap": 0}
    case = decode_case(batch=2, s_q=1, heads=9, with_length=False, with_sink=False, **cache)
    case["q"].zero_()  # so that all entries weigh the same
    unscaled = reference_decode(**case, out_dtype=torch.float32).out
    if layout == "bf16":
        case["cache"].data.mul_(2.0**exponent)
    else:
        case["cache"].data.view(-1, 656)[:, 512:528].view(torch.float32).mul_(2.0**exponent)
    found = decode_op(attend)(**case, splits=3, out_dtype=out_dtype).out
    absolute, relative = DECODE_TOLERANCE
    torch.testing.assert_close(found.float() * 2.0**-exponent, unscaled, atol=absolute, rtol=relative)


@pytest.mark.parametrize(
    ("exponent", "out_dtype"), [(-84, torch.bfloat16), (-30, torch.float32), (30, torch.bfloat16), (40, torch.float32)]
)
@pytest.mark.parametrize(("attend", "layout"), SHARING)
def test_shares_of_values_of_any_size(attend: Any, layout: str, exponent: int, out_dtype: torch.dtype) -> None:
    """Beyond what float16 has, which a share's output is between the kernels."""
    check_sizes(attend, layout, exponent, out_dtype)


def test_queries_are_copied_where_they_cannot_be_read_at_once() -> None:
    q = torch.zeros(3 * 5 * 576 + 8, dtype=torch.bfloat16)
    aligned = q[8:].view(3, 5, 576)
    assert sparse_mla_launch.readable_queries(aligned) is aligned
    off_its_start, off_its_stride = q[4:-4].view(3, 5, 576), q[: 3 * 5 * 572].view(3, 5, 572)
    for moved in (off_its_start, off_its_stride, aligned.transpose(1, 2)):
        copied = sparse_mla_launch.readable_queries(moved)
        assert copied.is_contiguous()
        assert copied.data_ptr() % 16 == 0
        assert copied.data_ptr() != moved.data_ptr()


CONVERTED = partial(
    check_shares, partial(sparse_mla.attend, variant=sparse_mla.PORTABLE_VARIANTS[4]), "v32_fp8", splits=7
)
TINY = partial(
    check_sizes, partial(sparse_mla.attend, variant=sparse_mla.PORTABLE_VARIANTS[4]), "v32_fp8", exponent=-84
)
TEAMS = partial(
    check_shares, partial(sparse_mla_rows.attend, variant=sparse_mla_rows.PORTABLE_VARIANTS[5]), "bf16", splits=7
)
ROWS = partial(
    check_shares, partial(sparse_mla_rows.attend, variant=sparse_mla_rows.PORTABLE_VARIANTS[4]), "bf16", splits=7
)
TURNS = partial(
    check_shares, partial(sparse_mla_rows.attend, variant=sparse_mla_rows.PORTABLE_VARIANTS[3]), "bf16", splits=7
)


def check_zeros() -> None:
    case = decode_case(layout="v32_fp8", batch=1, s_q=1, heads=9, slots=256, topk=256, with_length=False, gap=0)
    case["indices"].copy_(torch.arange(256))
    records = case["cache"].data.view(-1, 656).zero_()
    records[:, 512:528].view(torch.float32).fill_(2.0**90)
    out = decode_op(partial(sparse_mla.attend, variant=sparse_mla.PORTABLE_VARIANTS[2]))(**case, splits=3).out
    torch.testing.assert_close(out, torch.zeros_like(out))


def test_shares_of_zeros_with_large_scales() -> None:
    check_zeros()


def check_often(check: Any) -> None:
    """With another order of the threads each time: not each shows a missing barrier."""
    for _ in range(20):
        check()


@pytest.mark.parametrize(
    ("edit", "check"),
    [
        (("largest > 0.f ? min", "true ? min"), check_zeros),
        (("(__float_as_int(largest) >> 23), 80)", "(__float_as_int(largest) >> 23), 127)"), TINY),
        (("weight *= scale[k][piece];", ";"), CONVERTED),
        (("if (weight == 0.f) continue;", ";"), CONVERTED),
        (("is_odd ? 0x3276 : 0x5410", "0x5410"), CONVERTED),
        (("barrier_wait(arrival, 1);", ";"), CONVERTED),
        (("barrier_wait(arrival, 0);", ";"), CONVERTED),
        (("barrier_wait(shared_address(&shared.query), 0);", ";"), TEAMS),
        (("barrier_wait(shared_address(&shared.query), 0);", ";"), ROWS),
        (("(lane - begins + i & 7)", "(lane & 7)"), CONVERTED),
        (("named_sync(HALVES + warp / (WARPS / 2), THREADS / 2);", ";"), CONVERTED),
        (("if (turn && i == STEPS * 2 / 3) named_sync(barrier, 64);", ";"), CONVERTED),
        (("shared.begins[i] = begins;", "shared.begins[i] = 0;"), CONVERTED),
        (("piece ^ row & 7", "piece ^ row & 3"), TEAMS),
        (("head / 2 & 3", "head / 4 & 1"), TURNS),
        (("first ^ step % LINE_STEPS * 32", "first + step % LINE_STEPS * 32"), TURNS),
        (("first ^ tile % 4 * 32", "first + tile % 4 * 32"), TEAMS),
        (("first ^ steps * 32", "first + steps * 32"), ROWS),
    ],
    ids=[
        *("zeros", "small", "no scale", "nothing weighs", "no exchange", "second half", "first half", "teams", "rows"),
        *("pieces", "halves", "sums", "begins", "banks of rows", "banks of P", "steps", "values", "positions"),
    ],
)
def test_a_fault_in_shares_is_noticed(edit: tuple[str, str], check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_on_cpu, "edits", [edit])
    with pytest.raises(AssertionError, match=r"not close|wait for each other|share banks"):
        check_often(check)


def test_it_is_noticed_if_a_block_has_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_mla, "RAW", 656)
    with pytest.raises(AssertionError, match="beyond its shared memory"):
        CONVERTED()


@pytest.mark.parametrize("columns", [1, 700, 5000])
def test_topk_rows(columns: int) -> None:
    made = torch.Generator().manual_seed(columns)
    logits = torch.randn(5, columns, generator=made)
    logits[1] = logits[1].round()  # many are equal
    logits[2, ::3] = float("nan")
    starts = torch.tensor([0, 0, 3, columns // 2, columns], dtype=torch.int32).clamp(max=columns)
    ends = torch.full_like(starts, columns)
    found = topk.topk_rows(logits, starts, ends, 64).sort(-1).values
    torch.testing.assert_close(found, reference_topk_rows(logits, starts, ends, 64).sort(-1).values)


@pytest.mark.parametrize(
    ("edit", "variant"),
    [
        # The records of a step are not waited for, which other warps copy.
        (("barrier_wait(shared_address(&shared.full[stage]), turn.round(0) & 1);", ";"), 0),
        (("barrier_wait(shared_address(&shared.full[stage]), (u32)step / STAGES & 1);", ";"), 2),
        # Those that a warp has copied itself.
        (("wait_for_copies();  // those of the next block", ";  // those of the next block"), 3),
        # P is read before all warps have written it.
        (("changed = meet_or(changed);  // P is there", "// P is there"), 0),
        # Half of the keys do not weigh.
        (("state.sum[j] += p[0] + p[1];", "state.sum[j] += p[0];"), 0),
    ],
    ids=["no wait in turn", "no wait", "no wait for own copies", "no meeting", "half of the keys"],
)
def test_a_fault_is_noticed(edit: tuple[str, str], variant: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_on_cpu, "edits", [edit])
    attend = partial(sparse_mla.attend, variant=sparse_mla.PORTABLE_VARIANTS[variant])
    with pytest.raises(AssertionError, match=r"not close|wait for each other"):
        check_decode(attend, "v32_fp8", 5, 1)
