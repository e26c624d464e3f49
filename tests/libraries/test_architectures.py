"""What `EVIDENCE` says of each architecture is what the tests compile and what the records have."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.docs import RECORDS, ROOT
from nsa_plugin.libraries.architectures import (
    EMULATED,
    EVIDENCE,
    KIB,
    SHARED_MEMORY_PER_BLOCK,
    evidence,
    padded_shared_memory,
)
from nsa_plugin.tools.compare.record import read
from nsa_plugin.tools.pages.summary import engine_name, model_family

SERVED: list[dict[str, Any]] = [record for _, record in read(RECORDS) if record["verdict"]["holds"]]


def gpus(records: list[dict[str, Any]]) -> set[str]:
    return {record["host"]["gpu"].removeprefix("NVIDIA ").split()[0] for record in records}


def compiled(module: str, pattern: str) -> set[int]:
    """The SM versions that a test module compiles for, as it writes them."""
    (listed,) = re.findall(pattern, (ROOT / "tests" / "kernels" / module).read_text(), re.MULTILINE)
    return set(ast.literal_eval(listed))


def test_the_compiled_kernels_are_those_of_the_tests() -> None:
    triton = compiled(
        "test_triton_compiles.py", r'parametrize\("sm", (\[.+\])\)\ndef test_every_kernel_compiles_and_a_block_fits'
    )
    assert triton == {sm for sm, one in EVIDENCE.items() if "Triton" in one.compiled}
    cuda = compiled("test_cuda_architectures.py", r"^ARCHITECTURES = (\(.+\))$")
    assert cuda == {sm for sm, one in EVIDENCE.items() if "CUDA" in one.compiled}
    assert set(EVIDENCE) <= set(SHARED_MEMORY_PER_BLOCK)


def test_the_emulated_architecture_served_what_the_records_say() -> None:
    records = [record for record in SERVED if record["suite"].endswith("portable-on")]
    served: dict[str, set[str]] = {}
    for record in records:
        if model_family(record) == "V4":  # which vLLM's own model code serves on SM120 alone
            continue
        served.setdefault(engine_name(record).split()[0], set()).add(model_family(record))
    by = " and ".join(f"an {gpu}" for gpu in sorted(gpus(records)))
    what = ", ".join(f"{engine} with {' and '.join(sorted(models))}" for engine, models in sorted(served.items()))
    assert EVIDENCE[EMULATED].emulated == f"by {by}: {what}"


def test_what_was_run_is_what_the_records_have() -> None:
    ran = {sm for sm, one in EVIDENCE.items() if one.run}
    assert ran == {90}
    assert EVIDENCE[90].run == " and ".join(sorted(gpus(SERVED)))
    for path in RECORDS.glob("h*/*.json"):
        assert json.loads(path.read_text())["host"]["gpu"].startswith(("NVIDIA H100", "NVIDIA H200")), path


@pytest.mark.parametrize(
    ("sm", "sentence"),
    [
        (0, ""),
        (75, "SM75: not compiled for, not emulated, not run"),
        (
            80,
            "SM80: Triton and CUDA kernels compiled in the tests; emulated as SM86, which has less shared memory; not "
            "run on such a GPU",
        ),
        (
            89,
            "SM89: Triton and CUDA kernels compiled in the tests; emulated by an H100 in the GPU tests, not in a "
            "server; not run on such a GPU",
        ),
        (90, "SM90: Triton and CUDA kernels compiled in the tests; run on H100 and H200"),
        (100, "SM100: Triton kernels compiled in the tests; not emulated; not run on such a GPU"),
        (103, "SM103: not compiled for, not emulated, not run"),
    ],
)
def test_one_sentence_says_what_was_tested(sm: int, sentence: str) -> None:
    assert evidence(sm) == sentence


@pytest.mark.parametrize("sm", [0, 75, *EVIDENCE])
def test_a_line_of_doctor_says_it_briefly(sm: int) -> None:
    assert len(evidence(sm, brief=True)) <= 70
    assert evidence(86, brief=True) == "SM86: compiled in the tests; emulated; not run on such a GPU"
    assert evidence(90, brief=True) == "SM90: compiled in the tests; run on H100 and H200"


def resident(block: int, limit: int) -> int:
    """Blocks that a multiprocessor has shared memory for: it has 1 KiB more than a block may request, and keeps 1 KiB
    of it for each block."""
    return (limit + KIB) // (block + KIB)


@pytest.mark.parametrize(("needed", "without", "blocks"), [(95, 2, 1), (50, 4, 1), (49, 4, 2), (40, 5, 2), (99, 2, 1)])
def test_an_h100_holds_no_more_blocks_than_the_gpu_that_it_emulates(needed: int, without: int, blocks: int) -> None:
    real = SHARED_MEMORY_PER_BLOCK[90]
    padded = padded_shared_memory(needed * KIB, emulated=SHARED_MEMORY_PER_BLOCK[86], real=real)
    assert resident(needed * KIB, real) == without
    assert resident(padded, real) == blocks
    assert resident(padded - 1, real) == blocks + 1, "padded by no more than that"


def test_a_block_that_the_emulated_gpu_could_not_hold_is_not_padded() -> None:
    real = SHARED_MEMORY_PER_BLOCK[90]
    for needed in (99 * KIB + 1, 200 * KIB, real):
        assert padded_shared_memory(needed, emulated=SHARED_MEMORY_PER_BLOCK[86], real=real) == needed


@given(st.data())
def test_padding_leaves_room_for_the_emulated_gpus_blocks(data: st.DataObject) -> None:
    limits = sorted(set(SHARED_MEMORY_PER_BLOCK.values()))
    emulated = data.draw(st.sampled_from(limits))
    real = data.draw(st.sampled_from([limit for limit in limits if limit >= emulated]))
    needed = data.draw(st.integers(1, emulated))
    padded = padded_shared_memory(needed, emulated=emulated, real=real)
    assert needed <= padded <= real
    assert resident(padded, real) == resident(needed, emulated)
