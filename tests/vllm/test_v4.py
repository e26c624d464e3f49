"""The installed vLLM's DeepSeek-V4 layers and the objects that the ledger changes; nothing here needs a GPU."""

from __future__ import annotations

import inspect

import pytest
from packaging.version import Version

from nsa_plugin.patches.ledger import find
from nsa_plugin.patches.vllm_v4 import CHANGES

pytestmark = pytest.mark.engine_vllm


def test_the_flashmla_layers_have_what_the_ledger_changes():
    """From 0.28 on their window has a separate backend: the builder of the base class's serves no such layer."""
    import vllm
    from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

    owners = {}
    for patch in CHANGES:
        target = patch.target(Version(vllm.__version__))
        assert target is not None
        owners[patch.name], name, _ = find(target)
        assert name in ("_forward_prefill", "_forward_decode", "get_builder_cls")
    assert owners["vllm.v4-prefill"] is owners["vllm.v4-decode"] is DeepseekV4FlashMLAAttention
    assert owners["vllm.v4-swa-builder"] is DeepseekV4FlashMLAAttention.swa_backend_cls
    assert owners["vllm.v4-swa-builder"].get_builder_cls.__qualname__.startswith(owners["vllm.v4-swa-builder"].__name__)
    source = inspect.getsource(DeepseekV4IndexerCache.get_attn_backend)
    assert f"return {owners['vllm.v4-indexer-builder'].__name__}" in source
