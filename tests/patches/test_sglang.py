"""SGLang's ledger data, read without an engine."""

from __future__ import annotations

import re

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nsa_plugin.patches import sglang as data
from nsa_plugin.patches.ledger import Need, Patch

VERSIONS = [Version(f"0.5.{n}") for n in range(11, 24)]
BY_NAME = {patch.name: patch for patch in data.PATCHES}
SINCE_0_5_13 = {"sglang.registered-alias", "sglang.metadata-out-graph", "sglang.graph-metadata"}
SINCE = {
    "sglang.prefill-graph": "0.5.17",
    "sglang.split-prepare": "0.5.16",
    "sglang.split-core": "0.5.16",
    "sglang.split-queries": "0.5.16",
}
UNTIL_0_5_13 = {"sglang.graph-capture", "sglang.graph-replay"}
V4 = data.V4_ENTRY + data.V4_REQUIREMENTS + data.V4
# DeepSeek-V4's targets that not every version from 0.5.12 on has.
V4_ONLY = {
    "sglang.v4-attention": ">=0.5.21",
    "sglang.v4-forward": ">=0.5.12,<0.5.21",
    "sglang.v4-graph-replay": ">=0.5.13",
    "sglang.v4-graph-capture": ">=0.5.13",
    "sglang.v4-step-replay": ">=0.5.13",
    "sglang.v4-step-replay-before": ">=0.5.12,<0.5.13",
    "sglang.v4-tables": ">=0.5.22",
    "sglang.v4-pool-window-page": ">=0.5.22",
    "sglang.v4-pool-record": ">=0.5.21",
}


# SGLang before 0.5.22 calls DeepGEMM by its module, and before 0.5.21 plans a top-k kernel that needs SM90.
PORTABLE_ONLY = {
    "sglang.portable-deep-gemm": ">=0.5.16,<0.5.22",
    "sglang.portable-deep-gemm-indexer": ">=0.5.16,<0.5.22",
    "sglang.portable-topk-plan": ">=0.5.16,<0.5.21",
    "sglang.portable-schedule": ">=0.5.22",
    "sglang.portable-sm-count": ">=0.5.22",
    "sglang.portable-sm-count-indexer": ">=0.5.22",
}


def test_names_are_unique_and_start_with_the_engine() -> None:
    assert len(BY_NAME) == len(data.PATCHES)
    assert all(patch.engine == data.ENGINE and patch.name.startswith("sglang.") for patch in data.PATCHES)


@pytest.mark.parametrize("patch", data.PATCHES, ids=lambda patch: patch.name)
def test_every_entry_is_explained(patch: Patch) -> None:
    assert patch.why.endswith(".")
    assert bool(patch.remove_when) == bool(patch.replacement)  # a patch that changes SGLang has a removal condition


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_exactly_one_target_applies_in_each_supported_version(version: Version) -> None:
    assert version in SpecifierSet(data.SUPPORTED)
    for patch in data.PATCHES:
        holding = [t for t in patch.targets if version in SpecifierSet(t.versions)]
        missing = patch.name in (SINCE_0_5_13 if version < Version("0.5.13") else UNTIL_0_5_13)
        missing |= version < Version(SINCE.get(patch.name, "0.5.11"))
        if patch in data.PORTABLE:
            missing = version not in SpecifierSet(PORTABLE_ONLY.get(patch.name, ">=0.5.16"))
        if patch in V4:
            missing = version not in SpecifierSet(V4_ONLY.get(patch.name, ">=0.5.12"))
        assert len(holding) == (0 if missing else 1), patch.name


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_no_target_keeps_the_name_of_the_other_side_of_the_renaming(version: Version) -> None:
    other = r"dsa|DSA|DeepseekSparse" if version < Version("0.5.13") else r"nsa_|NativeSparse"
    for patch in data.PATCHES:
        target = patch.target(version)
        if target is not None:
            assert not re.search(other, target.path), target.path


def test_a_version_above_the_range_can_still_be_refused() -> None:
    for name in ("sglang.flags", "sglang.flag-values", "sglang.gate", "sglang.scheduler"):
        assert BY_NAME[name].target(Version("0.6")) is not None


def test_the_gate_wraps_the_method_that_resolves_the_arguments() -> None:
    paths = {str(v): BY_NAME["sglang.gate"].target(v) for v in VERSIONS}
    assert {v for v, t in paths.items() if t and t.path.endswith("__post_init__")} == {
        f"0.5.{n}" for n in range(11, 19)
    }
    assert all(t and t.path.endswith("resolve_once") for v, t in paths.items() if Version(v) >= Version("0.5.19"))


def test_needs() -> None:
    """GPU-only patches do not stop an engine on a CPU, and the flags work while the plugin is off."""
    assert {patch.need for patch in data.BOOTSTRAP + data.SCHEDULER} == {Need.BOOTSTRAP}
    assert {patch.need for patch in data.ENABLED} == {Need.ENABLED}
    assert {patch.need for patch in data.GPU} == {Need.GPU}
    assert {patch.need for patch in data.REQUIREMENTS} == {Need.ENABLED, Need.GPU}
    assert not any(patch.replacement for patch in data.REQUIREMENTS + data.V4_REQUIREMENTS)
    # The entry imports nothing of V4; everything else is imported on request.
    assert {patch.need for patch in data.V4_ENTRY} == {Need.GPU}
    assert {patch.need for patch in data.V4_REQUIREMENTS + data.V4} == {Need.GPU_V4}
    assert not any("deepseek_v4" in t.path or "dsv4." in t.path for p in data.PATCHES if p not in V4 for t in p.targets)


def test_requirements_on_the_class_come_before_its_replacement() -> None:
    """After the replacement the check would find the plugin's methods."""
    names = list(BY_NAME)
    for patch in data.REQUIREMENTS:
        assert names.index(patch.name) < names.index("sglang.backend")
    for patch in data.V4_REQUIREMENTS:
        assert names.index(patch.name) < names.index("sglang.v4-backend")


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_every_method_that_the_plugin_overrides_is_a_target(version: Version) -> None:
    attention = pytest.importorskip("nsa_plugin.backends.sglang.v32.attention")  # imports torch
    preparation = pytest.importorskip("nsa_plugin.backends.sglang.v32.preparation")
    targets = [target for patch in data.REQUIREMENTS if (target := patch.target(version)) is not None]
    methods = {target.attributes[-1] for target in targets if "SparseAttnBackend." in target.path}
    assert set(attention.OVERRIDDEN) <= methods
    assert len(methods.intersection(preparation.SETTERS)) == 1
    # A version has either all of them or none.
    assert set(preparation.GRAPH_METHODS) - methods == (
        set(preparation.GRAPH_METHODS[:1]) if version < Version("0.5.13") else set(preparation.GRAPH_METHODS[1:3])
    )


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_every_function_that_token_shard_uses_is_a_target(version: Version) -> None:
    token_shard = pytest.importorskip("nsa_plugin.backends.sglang.v32.token_shard")  # imports torch
    names = ("attention-group", "breakable-graph", "piecewise-graph")
    targets = [BY_NAME[f"sglang.{name}"].target(version) for name in names]
    found = [(target.module, *target.attributes) for target in targets if target is not None]
    for name, allowed in zip(found, ((token_shard.GROUP,), *token_shard.IN_GRAPH), strict=True):
        assert name in allowed


@pytest.mark.parametrize("version", [version for version in VERSIONS if version >= Version("0.5.12")], ids=str)
def test_every_method_of_v4_that_the_plugin_overrides_or_calls_is_a_target(version: Version) -> None:
    table = pytest.importorskip("nsa_plugin.backends.sglang.v4.table")
    attention = pytest.importorskip("nsa_plugin.backends.sglang.v4.attention")  # imports torch
    names = {target.attributes[-1] for patch in V4 if (target := patch.target(version)) is not None}
    methods = {target.attributes[-1] for target in data.V4_METHODS}
    assert set(attention.WRAPPERS) | set(table.ATTENTION) <= methods
    assert len(names.intersection(table.ATTENTION)) == 1
    assert {"store_cache", "_forward_prepare_normal", "_forward_prepare_multi_stream"} <= names & methods
    assert set(table.POOL) <= names
