"""A small checkpoint and its reference, shared by the tests that need nothing special of them."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec, write_checkpoint


@pytest.fixture(scope="session")
def spec():
    return CheckpointSpec(index_topk=16, num_hidden_layers=3, dtype="float32")


@pytest.fixture(scope="session")
def checkpoint(spec, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), spec)


@pytest.fixture(scope="session")
def reference(checkpoint):
    from nsa_plugin.tools.reference import ReferenceModel

    return ReferenceModel.load(checkpoint)


@pytest.fixture(scope="session")
def token_ids():
    import random

    source = random.Random(7)
    return [source.randrange(500) for _ in range(120)]
