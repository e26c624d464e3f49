"""The text form of the ledger's entries: what it says, and that a faulty text is an error."""

import pytest

from nsa_plugin.patches.ledger import Kind, Need, Target
from nsa_plugin.patches.section import Section

SECTION = Section(
    engine="vllm",
    prefix="vllm.",
    need=Need.GPU,
    versions=">=1",
    names={"layer": "layers.mla"},
    renamed={"<2": {"x": "nsa"}, ">=2": {"x": "dsa"}},
)


def test_entries():
    patch, requirement, renamed, one_side = SECTION.patches(
        """
        forward [<3]: {layer}:Attention.forward(self, q,
            k)
        forward [>=3]: {layer}:Attention.run(
            self)
            Why it is changed,
            in two lines.
            replacement: v32.patches:forward
            upstream: vllm #1
            until: vLLM does it
        base: class {layer}:Base
            Built on.
        backend: value {x}_backend:{x}
            Built on.
        later [>=2]: {x}_backend:later
            Built on.
        """
    )
    assert patch.name == "vllm.forward"
    assert [target.params for target in patch.targets] == [("self", "q", "k"), ("self",)]
    assert [target.versions for target in patch.targets] == ["<3", ">=3"]
    assert patch.why == "Why it is changed, in two lines."
    assert patch.replacement == "nsa_plugin.backends.vllm.v32.patches:forward"
    assert (patch.upstream, patch.remove_when) == ("vllm #1", "vLLM does it")
    assert requirement.targets == (Target(path="vllm.layers.mla:Base", kind=Kind.CLASS, versions=">=1"),)
    assert requirement.replacement == ""
    assert [(one.path, one.versions) for one in renamed.targets] == [
        ("vllm.nsa_backend:nsa", "<2"),
        ("vllm.dsa_backend:dsa", ">=2"),
    ]
    assert [(one.path, one.versions) for one in one_side.targets] == [("vllm.dsa_backend:later", ">=2")]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("a: m:f\n    Why.\n    replacment: p:f\n    until: it can go", TypeError, "replacment"),
        ("a: m:f\n    Why.\n    replacement: p:f", ValueError, "a: an entry has both a replacement and 'until', or"),
        ("a: m:f\n    Why.\n    until: it can go", ValueError, "a: an entry has both a replacement and 'until', or"),
        ("a: m:f\nb: m:g\n    Why.", TypeError, "why"),
        ("a: m:f\n    Why.\na: m:g\n    Why.", ValueError, "there are two entries 'a'"),
        ("a m:f\n    Why.", ValueError, "'a m:f' is not of the form"),
        ("a: m:f(x, y\n    Why.", ValueError, "is not of the form"),
        ("a: {unknown}:f\n    Why.", KeyError, "unknown"),
    ],
)
def test_a_faulty_text_is_an_error(text: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        SECTION.patches(text)
