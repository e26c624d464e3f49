"""Licences of the direct requirements, from the metadata of this environment."""

from __future__ import annotations

from email.message import Message
from importlib import metadata

import pytest

from ci import audit


def test_direct_requirements_have_allowed_licences() -> None:
    names = audit.installed(audit.direct())
    assert {"packaging", "rich", "pytest"} <= set(names)
    assert audit.refused(names) == {}


@pytest.mark.parametrize(
    ("fields", "licences", "allowed"),
    [
        ({"License-Expression": "Apache-2.0 WITH LLVM-exception"}, ["Apache-2.0", "LLVM-exception"], True),
        ({"License-Expression": "(MIT AND GPL-3.0-only)"}, ["GPL-3.0-only", "MIT"], False),
        ({"License": "MIT"}, ["MIT"], True),
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
