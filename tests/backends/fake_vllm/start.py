"""A vLLM that starts: the ledger of a few patches, a worker, and configurations with the plugin switched on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

from nsa_plugin.backends.vllm.startup import activation
from nsa_plugin.backends.vllm.v32 import patches as gpu_patches
from nsa_plugin.backends.vllm.v32.choice import BACKEND
from nsa_plugin.backends.vllm.v32.serving import GpuServing
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.patches.ledger import Need, Patch, Target
from nsa_plugin.settings import ResolvedSettings, Settings
from nsa_plugin.telemetry import Trace
from tests.backends.fake_vllm.config import config, layer
from tests.backends.fake_vllm.v32 import TRITON

ANOTHER = "FLASH_ATTN_MLA_SPARSE"


class Engine:
    """The functions that the ledger of these tests changes."""

    @staticmethod
    def serve() -> str:
        return "vLLM's"

    @staticmethod
    def serve_v4() -> str:
        return "vLLM's"

    @staticmethod
    def serve_portable() -> str:
        return "vLLM's"


def replacement(original: Any) -> Any:
    return staticmethod(lambda: "the plugin's")


PATCH = Patch(
    name="vllm.gpu-something",
    engine="vllm",
    need=Need.GPU,
    targets=(Target(path=f"{__name__}:Engine.serve", versions=">=0.20"),),
    replacement=f"{__name__}:replacement",
    why="stands in for the others",
)
V4_PATCH = replace(
    PATCH,
    name="vllm.v4-something",
    need=Need.GPU_V4,
    targets=(Target(path=f"{__name__}:Engine.serve_v4", versions=">=0.20"),),
)
PORTABLE_PATCH = replace(
    PATCH,
    name="vllm.portable-something",
    need=Need.PORTABLE,
    targets=(Target(path=f"{__name__}:Engine.serve_portable", versions=">=0.28"),),
)
DEVICE_KIND = activation.device_kind  # a fixture takes it away
FILE = f"{__name__.replace('.', '/')}.py"


SOURCE = "class Engine:\n def serve(): 0\n def serve_v4(): 0\n def serve_portable(): 0"


PATCHES = (PATCH, PORTABLE_PATCH, V4_PATCH)


class Worker:
    """vLLM's worker: built, given its GPU, then it loads its model and warms up."""

    def __init__(self, vllm_config: Any, rank: int = 0) -> None:
        self.vllm_config, self.rank, self.device = vllm_config, rank, "cpu"
        self.model_runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b"]))
        self.loaded = False

    def load_model(self) -> None:
        self.loaded = True
        backend = self.vllm_config.attention_config.backend or ANOTHER
        planned = backend == BACKEND and gpu_patches.planning() is not None
        self.vllm_config.compilation_config.static_forward_context["attn"] = layer(planned, backend)

    def compile_or_warm_up_model(self) -> float:
        return 1.5


class Here(GpuServing):
    """Replace the probed device by the one of these tests."""

    device: ClassVar[DeviceProfile] = TRITON

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, device_profile=lambda: self.device)


def serving(vllm_config: Any = None, device: Any = TRITON, **settings: Any) -> GpuServing:
    """The state of a worker that has its GPU."""
    resolved = ResolvedSettings(Settings(**settings), {})
    return GpuServing(
        resolved=resolved, trace=Trace(), vllm_config=vllm_config or config(), device_profile=lambda: device
    )


init_worker = activation.wrap_worker_init(Worker.__init__)
load_model = gpu_patches.worker_load(Worker.load_model)
warm_up = gpu_patches.worker_warm_up(Worker.compile_or_warm_up_model)


def engine_config(vllm_config: Any) -> Any:
    """Start as the process that reads the command line."""
    return activation.wrap_create_engine_config(lambda: vllm_config)()


def worker_of(vllm_config: Any, rank: int = 0) -> Worker:
    worker = Worker.__new__(Worker)
    init_worker(worker, vllm_config, rank)
    return worker


def configured(*, backend: str | None = None, cache_dtype: str = "fp8", **settings: Any) -> Any:
    vllm_config = config(
        cache_dtype,
        additional_config={"nsa_plugin": {"enabled": True} | settings},
        attention_config=SimpleNamespace(backend=backend),
    )
    vllm_config.model_config.model = "checkpoint"
    vllm_config.model_config.served_model_name = "model"
    return vllm_config


def enabled_v4(vllm_config: Any, **settings: Any) -> Any:
    vllm_config.additional_config = {"nsa_plugin": {"enabled": True} | settings}
    vllm_config.model_config.served_model_name = "model"
    return vllm_config
