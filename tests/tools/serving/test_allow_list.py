"""The variables that restrict which plugins an engine loads, read as vLLM 0.33 and SGLang 0.5.23 read theirs."""

from __future__ import annotations

from typing import Any

import pytest

from nsa_plugin.commands.engines import ENGINES
from nsa_plugin.tools.serving.allow_list import SGLANG_PLUGINS, VLLM_PLUGINS, allowing, kept_out

SPACE, LACKS = "lists nsa_plugin with a space", "does not list nsa_plugin"


def vllm_loads(value: str) -> bool:
    """`VLLM_PLUGINS` of `vllm/envs.py`, and `load_plugins_by_group` of `vllm/plugins/__init__.py`."""
    return "nsa_plugin" in value.split(",")


def sglang_loads(value: str) -> bool:
    """`load_plugins_by_group` of `sglang/srt/plugins/__init__.py`."""
    return not value or "nsa_plugin" in {name.strip() for name in value.split(",") if name.strip()}


@pytest.mark.parametrize(
    ("value", "vllm", "sglang"),
    [
        ("nsa_plugin", None, None),
        ("x,nsa_plugin", None, None),
        ("x, nsa_plugin", SPACE, None),
        ("nsa_plugin ,x", SPACE, None),
        ("x, nsa_plugin,nsa_plugin", None, None),
        ("", LACKS, None),
        (" ", LACKS, LACKS),
        (",", LACKS, LACKS),
        ("my_nsa_plugin", LACKS, LACKS),
    ],
)
def test_a_list_is_read_as_its_engine_reads_it(value: str, vllm: str | None, sglang: str | None) -> None:
    rules: list[tuple[str, Any, str | None]] = [
        (VLLM_PLUGINS, vllm_loads, vllm),
        (SGLANG_PLUGINS, sglang_loads, sglang),
    ]
    for variable, loads, said in rules:
        why = kept_out(variable, {variable: value})
        assert (why is None) == loads(value) == (said is None)
        assert why is None or (why.startswith(f"{variable}={value!r} ") and said is not None and said in why)
        assert loads(allowing(variable, {variable: value}))


def test_without_the_variable_every_plugin_is_loaded() -> None:
    assert [kept_out(variable, {}) for variable in (VLLM_PLUGINS, SGLANG_PLUGINS)] == [None, None]


def test_what_a_list_names_stays_allowed() -> None:
    assert allowing(VLLM_PLUGINS, {VLLM_PLUGINS: "one, two,,nsa_plugin "}) == "one,two,nsa_plugin"


def test_the_doctor_reads_the_variables_of_the_comparison() -> None:
    assert {name: engine.allow_list for name, engine in ENGINES.items()} == {
        "vllm": VLLM_PLUGINS,
        "sglang": SGLANG_PLUGINS,
    }
