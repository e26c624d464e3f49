"""How a soak starts each engine: the model, and a server whose KV cache is too small for its load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci.soak import census
from ci.soak.traffic import Limits
from nsa_plugin.tools.checkpoints.v32 import CheckpointSpec
from nsa_plugin.tools.compare.model import SPEC
from nsa_plugin.tools.serving.engine import ServedEngine
from nsa_plugin.tools.serving.sglang import SglangEngine
from nsa_plugin.tools.serving.vllm import VllmCpuEngine, VllmEngine, python_path_with_vllm_name

# The cache fits this many of the longest requests; far more are sent at once.
_CACHED_REQUESTS = 2
_CPU_PAGE, _GPU_PAGE = 16, 64
CENSUS = "census"
"""In the work directory, the folder of the counts of the plugin's objects."""
# glibc raises both limits to 32 and 64 MiB as blocks are freed. Batches of all sizes then leave holes in the heap, and
# resident memory shows the holes. Limits that are set stay: freed blocks of 1 MiB and more return to the system.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "2"}

# SGLang starts a request only if what the running ones are expected to generate fits, too. Of those that ignore the end
# token, as all of a soak do, it expects every token, whatever --schedule-conservativeness says (0.5.23,
# `schedule_policy.py`), and then has none to retract. This bounds what it expects, not what it generates.
_SGLANG_RESERVES = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine, its model and its server's limits.

    Attributes:
        minutes: of load, unless the user says otherwise.
        timeout: seconds after which a request counts as hung.
    """

    engine: ServedEngine
    spec: CheckpointSpec
    limits: Limits
    minutes: float
    timeout: float
    gpu: bool

    @property
    def flags(self) -> list[str]:
        limits = self.limits
        if isinstance(self.engine, SglangEngine):
            return [
                *("--context-length", str(limits.context)),
                *("--max-running-requests", str(limits.running)),
                *("--chunked-prefill-size", str(limits.chunk)),
                *("--max-total-tokens", str(_CACHED_REQUESTS * limits.context)),
                *("--page-size", str(_GPU_PAGE)),
            ]
        page = _GPU_PAGE if self.gpu else _CPU_PAGE
        return [
            *("--dtype", self.spec.dtype),
            *("--max-model-len", str(limits.context)),
            *("--max-num-seqs", str(limits.running)),
            *("--max-num-batched-tokens", str(limits.chunk)),
            *("--block-size", str(page)),
            *("--num-gpu-blocks-override", str(_CACHED_REQUESTS * limits.context // page)),
            *("--generation-config", "vllm"),
            "--disable-uvicorn-access-log",
            *(() if self.gpu else ("--enforce-eager", "--kv-cache-memory-bytes", str(256 * 2**20))),
        ]

    def environ(self, folder: Path) -> Mapping[str, str]:
        """Variables of the server. `folder` gets what its PYTHONPATH needs, and the counts of `census`."""
        site, counts = folder / "site", folder / CENSUS
        site.mkdir(parents=True, exist_ok=True)
        counts.mkdir(exist_ok=True)
        shutil.copyfile(census.__file__, site / "sitecustomize.py")
        wanted = dict(_MALLOC)
        if not self.gpu:
            # As in the demo: threads that spin while they wait starve a small machine.
            wanted |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            # oneDNN keeps up to 1024 matrix products, each with its code, one for each number of query tokens: hundreds
            # of MiB, which fill up for as long as new numbers come.
            wanted |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
        if isinstance(self.engine, SglangEngine):
            wanted |= _SGLANG_RESERVES
        kept = {name: os.environ.get(name, value) for name, value in wanted.items()}
        path = os.environ.get("PYTHONPATH", "") if self.gpu else python_path_with_vllm_name(site)
        paths = os.pathsep.join(filter(None, (str(site), path)))
        return kept | {"PYTHONPATH": paths, census.VARIABLE: str(counts), "DO_NOT_TRACK": "1"}


def _on_gpu(engine: ServedEngine) -> Setup:
    limits = Limits(context=8192, topk=SPEC.index_topk, chunk=4096, running=32, answer=512)
    return Setup(engine=engine, spec=SPEC, limits=limits, minutes=10, timeout=120, gpu=True)


_CPU_SPEC = CheckpointSpec(seed=2, dtype="float32")
SETUPS = {
    "vllm-cpu": Setup(
        engine=VllmCpuEngine(),
        spec=_CPU_SPEC,
        limits=Limits(context=1024, topk=_CPU_SPEC.index_topk, chunk=256, running=8),
        minutes=60,
        timeout=180,
        gpu=False,
    ),
    "vllm": _on_gpu(VllmEngine()),
    "sglang": _on_gpu(SglangEngine()),
}


def count_of(metrics: str, names: Sequence[str]) -> int | None:
    """The sum of the samples of the first of `names` that the text of /metrics has; None if it has none of them."""
    for name in names:
        samples = [line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        if samples:
            return int(sum(float(sample.rpartition(" ")[2]) for sample in samples))
    return None


def preemptions_of(metrics: str) -> int | None:
    """Requests that the server preempted (vLLM) or retracted (SGLang); None if the text has no metric of an engine.

    SGLang's counter has labels, so it has no sample before the first retraction: without one there was none.
    """
    found = count_of(metrics, PREEMPTIONS)
    if found is None and any(line.startswith(ENGINES) for line in metrics.splitlines()):
        return 0
    return found


ENGINES = ("vllm:", "sglang:")
"""Prefixes of the engines' metrics."""
PREEMPTIONS = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
