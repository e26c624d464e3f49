"""The workspace: who shares a buffer, how it grows, and what a graph capture allows."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nsa_plugin.kernels import workspace as module
from nsa_plugin.kernels.workspace import Workspace, WorkspaceError


@pytest.fixture
def workspace():
    return Workspace()


@pytest.fixture
def device_state(monkeypatch):
    """A stand-in for the state of a CUDA device: its current stream, and whether that is captured."""
    state = {"stream": 0, "capturing": False}
    monkeypatch.setattr(module, "_stream", lambda device: state["stream"])
    monkeypatch.setattr(module, "_is_capturing", lambda device: state["capturing"])
    return state


def test_shape_type_and_alignment(workspace):
    tensor = workspace.get("rows", (3, 5), torch.bfloat16, "cpu")
    assert tensor.shape == (3, 5)
    assert tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous()
    assert workspace.get("none", (0, 5), torch.float32, "cpu").shape == (0, 5)


def test_a_buffer_keeps_its_address_until_it_has_to_grow(workspace):
    first = workspace.get("rows", (1000,), torch.float32, "cpu")
    assert workspace.get("rows", (10, 10), torch.int64, "cpu").data_ptr() == first.data_ptr()
    grown = workspace.get("rows", (100_000,), torch.float32, "cpu")
    assert grown.data_ptr() != first.data_ptr()
    assert workspace.get("rows", (1000,), torch.float32, "cpu").data_ptr() == grown.data_ptr()


@pytest.mark.regression(13)
def test_names_and_streams_do_not_share(workspace, device_state):
    tensors = [workspace.get(name, (8,), torch.float32, "cpu") for name in ("a", "b")]
    device_state["stream"] = 7
    tensors.append(workspace.get("a", (8,), torch.float32, "cpu"))
    assert len({tensor.data_ptr() for tensor in tensors}) == 3
    device_state["stream"] = 0
    assert workspace.get("a", (8,), torch.float32, "cpu").data_ptr() == tensors[0].data_ptr()


def test_only_a_new_buffer_is_zeroed(workspace):
    counters = workspace.get("counters", (100,), torch.int32, "cpu", zeroed=True)
    assert (counters == 0).all()
    counters.fill_(3)
    assert (workspace.get("counters", (100,), torch.int32, "cpu", zeroed=True) == 3).all()
    assert (workspace.get("counters", (100_000,), torch.int32, "cpu", zeroed=True) == 0).all()


def test_threads_never_see_each_other_s_memory(workspace):
    """Each thread writes its own value and finds it again while the others write theirs."""
    threads, rounds = 8, 50
    barrier = threading.Barrier(threads)

    def run(value: int) -> tuple[int, bool]:
        intact, address = True, 0
        for turn in range(rounds):
            tensor = workspace.get("scratch", (256 + turn,), torch.int32, "cpu")
            tensor.fill_(value)
            barrier.wait()
            intact &= bool((tensor == value).all())
            address = tensor.data_ptr()
            barrier.wait()
        return address, intact

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(run, range(1, threads + 1)))
    assert all(intact for _, intact in results)
    assert len({address for address, _ in results}) == threads


@pytest.mark.regression(13)
def test_growing_during_capture_is_refused(workspace, device_state):
    device_state["capturing"] = True
    with pytest.raises(WorkspaceError, match=r"'scratch' holds 0 bytes .* needs 400"):
        workspace.get("scratch", (100,), torch.float32, "cpu")
    device_state["capturing"] = False
    workspace.get("scratch", (512,), torch.uint8, "cpu")
    device_state["capturing"] = True
    assert workspace.get("scratch", (128,), torch.float32, "cpu").numel() == 128
    with pytest.raises(WorkspaceError, match=r"holds 512 bytes .* needs 516"):
        workspace.get("scratch", (129,), torch.float32, "cpu")
    device_state["stream"] = 1
    with pytest.raises(WorkspaceError, match=r"holds 0 bytes"):
        workspace.get("scratch", (1,), torch.float32, "cpu")


@pytest.mark.regression(13)
def test_what_a_graph_captured_outlives_growth_and_its_thread(workspace, device_state):
    def capture() -> int:
        workspace.get("scratch", (4096,), torch.uint8, "cpu")
        device_state["capturing"] = True
        address = workspace.get("scratch", (1024,), torch.float32, "cpu").data_ptr()
        device_state["capturing"] = False
        grown = workspace.get("scratch", (1 << 20,), torch.float32, "cpu")
        assert grown.data_ptr() != address
        return address

    with ThreadPoolExecutor(1) as pool:
        address = pool.submit(capture).result()
    # Still allocated: no new buffer of the same size can take its place.
    others = [Workspace().get("x", (1024,), torch.float32, "cpu") for _ in range(50)]
    assert address not in {other.data_ptr() for other in others}
    assert [memory.data_ptr() for memory in workspace._captured] == [address]
    workspace.release()
    assert workspace._captured == []
