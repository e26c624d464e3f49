"""The registry: its providers, refusals with their reasons, and that nothing is imported before it is loaded."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_plugin.errors import NoProviderError
from nsa_plugin.libraries.registry import OPS, REFERENCE, Provider, Registry, RegistryError

PROVIDERS = [provider for op in OPS for provider in Registry().providers(op)]
WHOLE = {"op": "sparse_mla_prefill", "name": "fast", "target": "json:dumps"}


def test_every_op_has_a_reference_that_loads_on_any_device():
    registry = Registry()
    for op in OPS:
        assert next(iter(registry.providers(op))).name == REFERENCE
        module, _, name = OPS[op].partition(":")
        function = registry.load(op, REFERENCE, sm=None)
        assert function is getattr(importlib.import_module(module), name)
        assert function.__module__ == module
        assert module.startswith("nsa_plugin.kernels.")
        assert name.startswith("reference")


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: f"{provider.op}-{provider.name}")
def test_every_target_exists(provider):
    module, _, function = provider.target.partition(":")
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
    assigned = (node for statement in tree.body if isinstance(statement, ast.Assign) for node in ast.walk(statement))
    names = {node.id for node in assigned if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert function in names | {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_listing_and_refusing_imports_nothing():
    code = (
        "import sys\n"
        "from nsa_plugin.libraries.registry import Registry\n"
        "registry = Registry()\n"
        "for provider in registry.providers('sparse_mla_prefill'):\n"
        "    provider.refusal(90)\n"
        "sys.exit('torch' in sys.modules or 'nsa_plugin.kernels.sparse_mla' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_registered_provider_is_listed_after_the_reference_and_loaded_by_name():
    import json

    registry = Registry()
    registry.register(Provider(**WHOLE))
    before = [provider.name for provider in Registry().providers("sparse_mla_prefill")]
    assert [provider.name for provider in registry.providers("sparse_mla_prefill")] == [*before, "fast"]
    assert registry.load("sparse_mla_prefill", "fast") is json.dumps
    assert "fast" not in before
    assert before[0] == REFERENCE


@pytest.mark.parametrize(
    ("sm", "reason"),
    [(90, None), (100, None), (None, "it runs on SM90, SM100, not on a CPU"), (80, "not on SM80")],
)
def test_a_refusal_gives_the_reason(sm, reason):
    registry = Registry()
    registry.register(Provider(**WHOLE, sms=frozenset({90, 100})))
    if reason is None:
        registry.load("sparse_mla_prefill", "fast", sm=sm)
    else:
        with pytest.raises(NoProviderError, match="op sparse_mla_prefill: provider 'fast' is not available") as error:
            registry.load("sparse_mla_prefill", "fast", sm=sm)
        assert reason in str(error.value)


def test_a_missing_library_is_named():
    registry = Registry()
    registry.register(Provider(**WHOLE, modules=("json", "no_such_kernel_library")))
    with pytest.raises(NoProviderError, match="'fast' is not available: not installed: no_such_kernel_library"):
        registry.load("sparse_mla_prefill", "fast")


@pytest.mark.parametrize("target", ["no_such_module:run", "json:no_such_function"])
def test_a_provider_that_does_not_load_is_an_error(target):
    registry = Registry()
    registry.register(Provider(**(WHOLE | {"target": target})))
    with pytest.raises(NoProviderError, match=r"provider 'fast' does not load: .*no_such_"):
        registry.load("sparse_mla_prefill", "fast")


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        NoProviderError, match="op mha_one_shot: no provider 'fa9'; registered: reference, fa3, trtllm, triton"
    ):
        Registry().load("mha_one_shot", "fa9")
    with pytest.raises(RegistryError, match="op is 'attention'; allowed: sparse_mla_prefill, "):
        Registry().providers("attention")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "attention"}, "op is 'attention'; allowed: sparse_mla_prefill, "),
        ({"name": REFERENCE}, "provider 'reference' is already registered"),
        ({"target": "json.dumps"}, "target is 'json.dumps', not 'module:function'"),
        ({"target": "json:"}, "target is 'json:'"),
    ],
)
def test_faulty_registrations_are_errors(changes, message):
    with pytest.raises(RegistryError, match=message):
        Registry().register(Provider(**(WHOLE | changes)))
