"""The contract check itself: what it finds in a wheel's files, and that it fails where it should."""

from __future__ import annotations

import inspect
import json
import subprocess
from collections.abc import Callable

import pytest
from packaging.version import Version

from ci import flashinfer_contract as contract
from ci.wheels import WheelError
from nsa_plugin.kernels.providers.trtllm import CALLS, MHA_FUNCTION, MLA_FUNCTION

PARAMETERS = {target: ", ".join(sorted(keywords.always)) for target, keywords in CALLS.items()}

# The lines that the provider relies on, as versions from 0.6.16 write them.
MLA_BODY = """
    block_size = kv_cache.size(-2)
    if 64 < num_heads_q < 128: raise ValueError
    elif block_size != 32 and block_size != 64: raise ValueError
    if query.ndim == 4: pass
    if kv_cache.ndim == 3:
        kv_cache = kv_cache.unsqueeze(1)
    if qk_head_dim != expected_qk_head_dim or ckv_dim != expected_qk_head_dim: raise ValueError
    if page_table.shape != (num_seqs, num_tokens, sparse_mla_top_k): raise ValueError
    check_shape_dtype_device(
        out, expected_out_shape, torch.bfloat16, query.device, "out",
    )
    return backend == "trtllm-gen"
"""
MHA_BODY = """
    a = query.shape[2] == 192 and key.shape[2] == 192 and value.shape[2] == 128
    b = query.shape[2] == 128 and key.shape[2] == 128 and value.shape[2] == 128
    c = query.shape[2] == 256 and key.shape[2] == 256 and value.shape[2] == 256
    expected_shape = (query.shape[0], query.shape[1], value.shape[2])
"""


def files(mla: str = "", mha: str = "") -> dict[str, str]:
    mla = mla or f"def {MLA_FUNCTION[1]}({PARAMETERS[MLA_FUNCTION]}, sinks=None, *, return_lse=False):{MLA_BODY}"
    mha = mha or f"def {MHA_FUNCTION[1]}({PARAMETERS[MHA_FUNCTION]}, lse=None):{MHA_BODY}"
    return {
        "flashinfer/prefill.py": mha,
        "flashinfer/decode.py": f"from .mla import (\n    other,\n    {MLA_FUNCTION[1]} as {MLA_FUNCTION[1]},\n)\n",
        "flashinfer/mla/__init__.py": "from ._other import *\nfrom ._core import *\n",
        "flashinfer/mla/_other.py": "from . import _core\n",
        "flashinfer/mla/_core.py": mla,
    }


def check(target: tuple[str, str], version: str = "0.7.0", **changed: str) -> contract.Finding:
    return contract.check_function(files(**changed).get, version, target)


@pytest.mark.parametrize("target", CALLS)
def test_a_version_that_takes_the_calls(target: tuple[str, str]) -> None:
    finding = check(target)
    assert finding.problems == ()
    assert finding.defined_in == ("flashinfer/mla/_core.py" if target == MLA_FUNCTION else "flashinfer/prefill.py")


@pytest.mark.parametrize(
    ("target", "name"), [(t, name) for t, keywords in CALLS.items() for name in sorted(keywords.always)]
)
def test_every_missing_parameter_is_found(target: tuple[str, str], name: str) -> None:
    key, path = ("mla", "mla/_core.py") if target == MLA_FUNCTION else ("mha", "prefill.py")
    fewer = ", ".join(sorted(CALLS[target].always - {name}))
    finding = check(target, **{key: files()[f"flashinfer/{path}"].replace(PARAMETERS[target], fewer)})
    assert len(finding.problems) == 1
    assert finding.problems[0].endswith(f"has no parameter {name}")


def test_a_new_required_parameter_is_found() -> None:
    source = files()["flashinfer/prefill.py"].replace("lse=None", "must_be_given")
    assert (
        "requires must_be_given" in check(MHA_FUNCTION, mha=source.replace("(key", "(must_be_given, key")).problems[0]
    )


@pytest.mark.parametrize(
    ("target", "line", "name"),
    [
        (MLA_FUNCTION, "(num_seqs, num_tokens, sparse_mla_top_k)", "a page table of"),
        (MLA_FUNCTION, "block_size != 32 and block_size != 64", "pages of 32 or 64 rows"),
        (MLA_FUNCTION, "64 < num_heads_q < 128", "no 65 to 127 heads"),
        (MLA_FUNCTION, "query.ndim == 4", "q of 4 dimensions"),
        (MHA_FUNCTION, "query.shape[2] == 192", "heads of 192 and 128 values"),
        (MHA_FUNCTION, "query.shape[2] == 256", "heads of 256 and 256 values"),
    ],
)
def test_every_lost_assertion_is_found(target: tuple[str, str], line: str, name: str) -> None:
    key, path = ("mla", "mla/_core.py") if target == MLA_FUNCTION else ("mha", "prefill.py")
    finding = check(target, **{key: files()[f"flashinfer/{path}"].replace(line, "True")})
    assert any(f"no longer says: {name}" in problem for problem in finding.problems)


def test_what_came_later_is_not_asked_of_older_versions() -> None:
    older_mha = files()["flashinfer/prefill.py"].replace("query.shape[2] == 256", "True")
    assert check(MHA_FUNCTION, "0.6.11.post3", mha=older_mha).problems == ()
    assert check(MHA_FUNCTION, "0.6.12", mha=older_mha).problems
    older_mla = files()["flashinfer/mla/_core.py"].replace(", *, return_lse=False", "")
    older_mla = older_mla.replace("64 < num_heads_q < 128", "False")
    assert check(MLA_FUNCTION, "0.6.11", mla=older_mla).problems == ()
    assert (
        "no parameter return_lse, which it has since 0.6.12" in check(MLA_FUNCTION, "0.6.12", mla=older_mla).problems[0]
    )


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("flashinfer/decode.py", None, "flashinfer.decode is not there"),
        ("flashinfer/decode.py", "", "flashinfer.decode has no function"),
        ("flashinfer/mla/__init__.py", "from .gone import *", "has no function"),
        ("flashinfer/mla/_core.py", "from . import trtllm_batch_decode_with_kv_cache_mla", "has no function"),
    ],
)
def test_a_function_that_cannot_be_found(path: str, text: str | None, message: str) -> None:
    found = {name: body for name, body in (files() | {path: text}).items() if body is not None}
    finding = contract.check_function(found.get, "0.7.0", MLA_FUNCTION)
    assert message in finding.problems[0]


def test_parameters_are_those_of_the_live_function() -> None:
    namespace: dict[str, Callable[..., object]] = {}
    source = files()["flashinfer/mla/_core.py"]
    exec(source.partition(":")[0] + ": ...", namespace)
    live = inspect.signature(namespace[MLA_FUNCTION[1]]).parameters
    _, _, node = contract.find_function(files().get, *MLA_FUNCTION)
    read = contract.parameters_of(node.args)
    assert list(read) == list(live)
    for name, parameter in live.items():
        assert read[name].kind == parameter.kind
        assert (read[name].default is parameter.empty) == (parameter.default is parameter.empty)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """What pip prints, and where it is kept."""
    answer = {"stdout": "flashinfer-python (0.9.0)\nAvailable versions: 0.9.0, 0.7.2.post1, 0.7.2, 0.6.8, 0.6.7\n"}
    monkeypatch.setattr(contract, "VERSIONS", tmp_path / "versions.json")

    def run(command, **_):
        assert command[-1] == contract.DISTRIBUTION
        return subprocess.CompletedProcess(command, 0 if answer["stdout"] else 1, answer["stdout"], "no index")

    monkeypatch.setattr(contract.subprocess, "run", run)
    return answer


def test_versions_are_those_of_the_extra(index) -> None:
    found = contract.supported_versions()
    assert found == ["0.6.8", "0.7.2", "0.7.2.post1"]
    index["stdout"] = ""
    assert contract.supported_versions() == found
    assert "0.6.7" in json.loads(contract.VERSIONS.read_text())
    contract.VERSIONS.unlink()
    with pytest.raises(WheelError, match="no index"):
        contract.supported_versions()


@pytest.mark.parametrize("broken", [False, True])
def test_the_outcome_is_the_exit_status(broken, monkeypatch, capsys) -> None:
    problems = ("it lacks something",) if broken else ()
    findings = [contract.Finding("0.7.2", contract.TRTLLM, target, "x.py", problems) for target in CALLS]
    monkeypatch.setattr(contract, "check_version", lambda version: findings)
    monkeypatch.setattr("sys.argv", ["x", "--version", "0.7.2"])
    assert contract.main() == int(broken)
    printed = capsys.readouterr().out
    assert MLA_FUNCTION[1] in printed
    assert ("it lacks something" in printed) == broken
    assert f"{0 if broken else 1} of 1 versions take the calls" in printed


def test_reliances_name_known_functions_and_versions() -> None:
    assert {reliance.target for reliance in contract.RELIANCES} == set(CALLS)
    for reliance in contract.RELIANCES:
        assert reliance.counts_for(Version("0.7.2"))
        assert not any(reliance.counts_for(Version(version)) for version in reliance.silent)
