"""Device profiles: the limits of the manifest on a device, and the probe on simulated machines."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa_plugin.decision.shapes import FAMILY_LAYOUTS
from nsa_plugin.libraries.capabilities import Capability, Op
from nsa_plugin.libraries.devices import GIB, emulating, synthetic
from nsa_plugin.libraries.manifest import MANIFEST
from nsa_plugin.libraries.probe import probe

H200_SMEM = 227 << 10
OLD_FLASH_MLA = ("sglang-kernel", "0.4.5")


# ---------------------------------------------------------------------------------------------------
# Capabilities


@pytest.mark.regression(18)
@pytest.mark.parametrize(
    ("library", "op", "layout", "heads", "given"),
    [
        # sglang #13646: FlashMLA's prefill kernel pads to 64 on SM90 and to 128 on SM100.
        ((90, "flash_mla"), Op.SPARSE_MLA_PREFILL, "bf16", 16, 64),
        ((90, "flash_mla"), Op.SPARSE_MLA_PREFILL, "bf16", 64, 64),
        ((90, "flash_mla"), Op.SPARSE_MLA_PREFILL, "bf16", 65, 128),
        ((90, "flash_mla"), Op.SPARSE_MLA_PREFILL, "bf16", 130, None),
        ((100, "flash_mla"), Op.SPARSE_MLA_PREFILL, "bf16", 16, 128),
        # Its decode kernel is instantiated for 64 and 128 heads on both.
        ((90, "flash_mla"), Op.SPARSE_MLA_DECODE, "v32_fp8", 1, 64),
        ((103, "flash_mla"), Op.SPARSE_MLA_DECODE, "v4_fp8", 64, 64),
        ((100, "flash_mla"), Op.SPARSE_MLA_DECODE, "v32_fp8", 96, 128),
        ((90, "flash_mla"), Op.SPARSE_MLA_DECODE, "v32_fp8", 129, None),
        ((90, "fa3"), Op.SPARSE_MLA_DECODE, "bf16", 5, 5),
        ((100, "trtllm"), Op.SPARSE_MLA_DECODE, "bf16", 24, 24),
        ((0, "reference"), Op.SPARSE_MLA_DECODE, "v4_fp8", 3, 3),
    ],
)
def test_heads_that_a_kernel_runs_with(
    library: tuple[int, str], op: Op, layout: str, heads: int, given: int | None
) -> None:
    sm, name = library
    capability = synthetic(sm).capability(name, op, layout)
    assert capability is not None
    assert capability.heads_given(heads) == given


@pytest.mark.parametrize(
    ("name", "sms"),
    [
        ("flash_mla", {90, 100, 103}),
        ("deep_gemm", {90, 100, 103, 120}),
        ("fa3", {90}),
        ("trtllm", {100, 103}),
        ("cuda", {80, 90, 120}),
        ("triton", {80, 90, 100, 103, 120}),
        ("reference", {0, 80, 90, 100, 103, 120}),
    ],
)
def test_libraries_by_architecture(name: str, sms: set[int]) -> None:
    every = (0, 80, 90, 100, 103, 120)
    assert {sm for sm in every if synthetic(sm).libraries[name].available} == sms
    for sm in set(every) - sms:
        library = synthetic(sm).libraries[name]
        assert library.reason
        assert library.capabilities == ()


@pytest.mark.parametrize(
    ("library", "op", "layout"),
    [
        ("flash_mla", Op.SPARSE_MLA_PREFILL, "v32_fp8"),  # flash_mla_sparse_fwd reads bf16 only
        ("flash_mla", Op.SPARSE_MLA_DECODE, "bf16"),  # flash_mla_with_kvcache reads fp8 only
        ("flash_mla", Op.MHA_ONE_SHOT, "bf16"),
        ("fa3", Op.SPARSE_MLA_DECODE, "v32_fp8"),
        ("fa3", Op.SPARSE_MLA_PREFILL, "bf16"),
    ],
)
def test_kernels_that_do_not_exist(library: str, op: Op, layout: str) -> None:
    assert not synthetic(90).has(library, op, layout)


def test_trtllm_reads_plain_rows_only() -> None:
    device = synthetic(100)
    assert device.has("trtllm", Op.SPARSE_MLA_DECODE, "bf16")
    assert not device.has("trtllm", Op.SPARSE_MLA_DECODE, "v32_fp8")


def test_every_kernel_reads_layouts_that_models_have() -> None:
    known = {layout for layouts in FAMILY_LAYOUTS.values() for layout in layouts}
    for sm in (0, 90, 100):
        for library in synthetic(sm).libraries.values():
            for capability in library.capabilities:
                assert set(capability.layouts) <= known, (library.name, capability.op)


@pytest.mark.regression(6, "DeepSeek-V4")
@pytest.mark.parametrize(
    ("build", "smem", "rows"),
    [
        (OLD_FLASH_MLA, 228 << 10, 11673),  # what sglang #25502 computed
        (OLD_FLASH_MLA, H200_SMEM, 11622),  # what an H200 grants
        (("vllm", "0.32.0"), H200_SMEM, 11622),
        (("sgl-flash-mla", "1.0.0"), H200_SMEM, None),
        (("sgl-flash-mla", "1.2.0rc1"), H200_SMEM, None),
        (("sgl-flash-mla", "0.9.0"), H200_SMEM, 11622),
        (("sgl-flash-mla", "unreadable"), H200_SMEM, 11622),
    ],
)
def test_row_limit_of_flash_mla_belongs_to_the_build(build: tuple[str, str], smem: int, rows: int | None) -> None:
    device = synthetic(90, versions={"flash_mla": build}, smem_per_block=smem)
    capability = device.capability("flash_mla", Op.SPARSE_MLA_DECODE, "v32_fp8")
    assert capability is not None
    assert capability.max_rows == rows
    prefill = device.capability("flash_mla", Op.SPARSE_MLA_PREFILL, "bf16")
    assert prefill is not None
    assert prefill.max_rows is None


@pytest.mark.parametrize(
    ("build", "rows"),
    [
        (("sgl-deep-gemm", "0.1.3"), 12288),  # static arrays: 48 KiB
        (("sgl-deep-gemm", "0.1.4.post1"), 58112),  # dynamic: one array in 227 KiB
        (("sgl-deep-gemm", "0.2.3.post2"), 58112),
        (("deep-gemm", "2.5.0"), 12288),
        (("vllm", "0.32.0"), 12288),
    ],
)
def test_row_limit_of_deep_gemm_belongs_to_the_build(build: tuple[str, str], rows: int) -> None:
    capability = synthetic(90, versions={"deep_gemm": build}).capability("deep_gemm", Op.INDEXER_METADATA)
    assert capability is not None
    assert capability.max_rows == rows


def test_row_limit_of_deep_gemm_on_sm100() -> None:
    capability = synthetic(100).capability("deep_gemm", Op.INDEXER_METADATA)
    assert capability is not None
    assert capability.max_rows == 29024  # two arrays in 227 KiB


def test_kernels_for_other_architectures_are_left_out() -> None:
    more = Capability(op=Op.MHA_ONE_SHOT, layouts=("bf16",), sm_min=100, sm_max=109)
    fa3 = MANIFEST["fa3"]
    assert all(kernel.sm_max == 90 for kernel in fa3.kernels)
    found = fa3.kernels_on(103, distribution="", version="", smem_per_block=H200_SMEM, more=(more,))
    assert found == (more,)


# ---------------------------------------------------------------------------------------------------
# Synthetic profiles


def test_synthetic_installs_the_given_libraries() -> None:
    device = synthetic(90, libraries=("fa3",))
    assert {name for name, library in device.libraries.items() if library.available} == {"fa3", "reference"}
    assert device.libraries["flash_mla"].reason == "not installed"
    assert device.providers(Op.SPARSE_MLA_DECODE) == ("fa3", "reference")
    assert device.capability("flash_mla", Op.SPARSE_MLA_DECODE) is None


def test_a_kernel_that_reads_no_kv_cache_serves_every_layout() -> None:
    assert synthetic(90).has("deep_gemm", Op.INDEXER_TOPK, "v32_fp8")
    assert not synthetic(90).has("flash_mla", Op.INDEXER_TOPK, "v32_fp8")


def test_synthetic_cpu_has_the_reference_only() -> None:
    device = synthetic(0)
    assert (device.kind, device.where, device.smem_per_block, device.nvlink) == ("cpu", "a CPU", 0, False)
    assert device.libraries["flash_mla"].reason == "needs an NVIDIA GPU; this device is a CPU"
    assert all(device.has("reference", op) for op in (Op.MHA_ONE_SHOT, Op.SPARSE_MLA_PREFILL, Op.INDEXER_TOPK))


def test_synthetic_accepts_kernels_of_a_later_release() -> None:
    kernel = Capability(op=Op.MHA_ONE_SHOT, layouts=(), sm_min=90, sm_max=90)
    assert "cuda" not in synthetic(90).providers(Op.MHA_ONE_SHOT)
    assert "cuda" in synthetic(90, kernels={"cuda": (kernel,)}).providers(Op.MHA_ONE_SHOT)
    assert "cuda" not in synthetic(100, kernels={"cuda": (kernel,)}).providers(Op.MHA_ONE_SHOT)


def test_synthetic_refuses_an_unknown_library() -> None:
    with pytest.raises(ValueError, match=r"unknown library cudnn; allowed: flash_mla, deep_gemm"):
        synthetic(90, libraries=("cudnn",))


def test_a_profile_is_available_as_json_and_as_one_line() -> None:
    device = synthetic(90, libraries=("flash_mla",), memory_total=140 * GIB, memory_free=35 * GIB)
    data = json.loads(json.dumps(device.as_dict()))
    assert data["sm"] == 90
    assert data["libraries"]["flash_mla"]["capabilities"][0]["op"] == "sparse_mla_prefill"
    assert set(data["libraries"]) == set(MANIFEST)
    assert device.describe() == (
        "synthetic SM90 (SM90), 35.0 of 140.0 GiB free, kernels: flash_mla 1.0.0, reference 2.14.1"
    )


def test_every_kernel_of_a_registry_op_has_a_provider() -> None:
    for library in MANIFEST.values():
        for kernel in library.kernels:
            # The registry has no op for a schedule or for the all-to-all.
            if kernel.op not in (Op.INDEXER_METADATA, Op.SCHEDULED_LOGITS, Op.TOKEN_SHARD):
                assert kernel.op in library.targets


def test_the_cuda_kernels_leave_out_sm100_and_need_their_bindings() -> None:
    reason = "its kernels are built for SM80 to SM90, SM120 to SM121; this device is SM100"
    assert synthetic(100).libraries["cuda"].reason == reason
    assert "not installed" in synthetic(90, libraries=("triton",)).libraries["cuda"].reason


# ---------------------------------------------------------------------------------------------------
# The probe


def test_importing_the_decision_imports_neither_torch_nor_an_engine() -> None:
    code = (
        "import sys, nsa_plugin.libraries.devices, nsa_plugin.decision.dispatch\n"
        "heavy = {'torch', 'vllm', 'sglang', 'triton', 'flash_mla', 'deep_gemm', 'flashinfer', 'sgl_kernel'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Site:
    """A folder of installed packages."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, files: dict[str, str], *, distribution: str = "", version: str = "") -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if distribution:
            info = self.root / f"{distribution.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", encoding="utf-8"
            )
        importlib.invalidate_caches()


FAKED = ("flash_mla", "deep_gemm", "sgl_kernel", "flashinfer", "vllm", "pynvml")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Simulate an H200 on which only the packages of the folder are installed."""

    def forget() -> None:
        for module in [name for name in sys.modules if name.split(".")[0] in FAKED]:
            monkeypatch.delitem(sys.modules, module)

    properties = SimpleNamespace(
        major=9, minor=0, name="NVIDIA H200", uuid="none", shared_memory_per_block_optin=H200_SMEM
    )
    torch = SimpleNamespace(
        version=SimpleNamespace(cuda="13.0"),
        cuda=SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            get_device_properties=lambda index: properties,
            mem_get_info=lambda index: (100 * GIB, 141 * GIB),
        ),
    )
    # Only this folder and the standard library: packages of the test machine are not visible.
    standard = [entry for entry in sys.path if "site-packages" not in entry]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *standard])
    forget()
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    probe.cache_clear()
    yield Site(tmp_path)
    probe.cache_clear()
    for module in [name for name in sys.modules if name.split(".")[0] in FAKED]:
        del sys.modules[module]


FLASH_MLA = {"flash_mla/__init__.py": "def has_legacy():\n    return True\n"}


def test_an_h200_with_nothing_installed(site: Site) -> None:
    device = probe()
    assert (device.kind, device.sm, device.name, device.where) == ("cuda", 90, "NVIDIA H200", "SM90")
    assert (device.memory_total, device.memory_free) == (141 * GIB, 100 * GIB)
    assert device.smem_per_block == H200_SMEM
    assert device.libraries["flash_mla"].reason == (
        "not installed (looked for sgl-flash-mla, sglang-kernel, sgl-kernel, vllm)"
    )
    assert not any(library.available for library in device.libraries.values() if library.name != "reference")


def test_an_installed_library_is_found_with_its_limits(site: Site) -> None:
    site.add(FLASH_MLA, distribution="sgl-flash-mla", version="1.0.0")
    site.add({"deep_gemm/__init__.py": ""}, distribution="sgl-deep-gemm", version="0.1.3")
    device = probe()
    flash_mla = device.libraries["flash_mla"]
    assert (flash_mla.available, flash_mla.reason) == (True, "")
    assert (flash_mla.distribution, flash_mla.version, flash_mla.module) == ("sgl-flash-mla", "1.0.0", "flash_mla")
    metadata = device.capability("deep_gemm", Op.INDEXER_METADATA)
    assert metadata is not None
    assert metadata.max_rows == 12288
    assert probe() is device


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ImportError('no cubin')", "flash_mla is installed but does not load: ImportError: no cubin"),
        ("raise OSError('libcuda.so.1: cannot open')", "does not load: OSError: libcuda.so.1: cannot open"),
        ("assert False, 'CUDA_HOME'", "does not load: AssertionError: CUDA_HOME"),
        ("def has_legacy():\n    return False", "does not have the kernels for the V3.2 and V4 caches"),
    ],
    ids=["import", "libcuda", "toolkit", "no legacy"],
)
def test_a_library_that_does_not_load_says_why(site: Site, body: str, reason: str) -> None:
    site.add({"flash_mla/__init__.py": body}, distribution="sgl-flash-mla", version="1.0.0")
    library = probe().libraries["flash_mla"]
    assert not library.available
    assert reason in library.reason
    assert (library.version, library.capabilities) == ("1.0.0", ())


def test_a_module_of_an_unknown_distribution_is_not_used(site: Site) -> None:
    site.add(FLASH_MLA, distribution="flash-mla", version="2.0.0")
    library = probe().libraries["flash_mla"]
    assert not library.available
    assert library.reason == "the installed flash_mla is not from sgl-flash-mla"


def test_the_next_host_is_used_if_the_first_does_not_load(site: Site) -> None:
    site.add({"flash_mla.py": "raise OSError('libcuda.so.1')"}, distribution="sgl-flash-mla", version="1.0.0")
    site.add(
        {"sgl_kernel/__init__.py": "", "sgl_kernel/flash_mla.py": "_flashmla_import_error = None"},
        distribution="sglang-kernel",
        version="0.4.5",
    )
    library = probe().libraries["flash_mla"]
    assert (library.available, library.module) == (True, "sgl_kernel.flash_mla")
    assert {capability.max_rows for capability in library.capabilities} == {None, 11622}


def test_an_extension_that_failed_silently_is_detected(site: Site) -> None:
    site.add(
        {
            "sgl_kernel/__init__.py": "",
            "sgl_kernel/flash_mla.py": "_flashmla_import_error = ImportError('undefined symbol')",
        },
        distribution="sglang-kernel",
        version="0.4.5",
    )
    library = probe().libraries["flash_mla"]
    assert not library.available
    assert "its extension does not load: undefined symbol" in library.reason


NVML = """
import collections
NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
calls = collections.Counter()

class NVMLError(Exception):
    pass

def nvmlInit():
    calls["init"] += 1

def nvmlShutdown():
    calls["shutdown"] += 1

def nvmlDeviceGetHandleByUUID(uuid):
    assert uuid == "GPU-none"
    return 1

def nvmlDeviceGetHandleByIndex(index):
    return index

def nvmlDeviceGetIndex(handle):
    return handle

def nvmlDeviceGetCount():
    return COUNT

def nvmlDeviceGetP2PStatus(one, other, capability):
    assert one != other and capability == NVML_P2P_CAPS_INDEX_NVLINK
    if LINKS[other] is None:
        raise NVMLError("not supported")
    return LINKS[other]
"""


@pytest.mark.parametrize(
    ("links", "nvlink"),
    [("[0, 9]", True), ("[5, 9]", False), ("[None, 9, 0]", True), ("[None, 9]", False), ("[9]", False)],
    ids=["linked", "pci", "one fails", "all fail", "alone"],
)
def test_nvlink_means_a_link_to_another_gpu(site: Site, links: str, nvlink: bool) -> None:
    text = f"{NVML}\nLINKS = {links}\nCOUNT = len(LINKS)\n"
    site.add({"pynvml.py": text.replace("return 1\n", "return 0\n") if links == "[9]" else text})
    assert probe().nvlink is nvlink
    assert sys.modules["pynvml"].calls == {"init": 1, "shutdown": 1}


def test_an_engines_kernels_are_found_without_importing_the_engine(site: Site) -> None:
    site.add(
        {
            "vllm/__init__.py": "raise RuntimeError('an engine was imported')",
            "vllm/_flashmla_C.abi3.so": "",
            "vllm/third_party/deep_gemm/__init__.py": "",
            "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": "",
        },
        distribution="vllm",
        version="0.32.0",
    )
    libraries = probe().libraries
    found = {name: library.module for name, library in libraries.items() if library.available}
    found.pop("reference", None)
    assert found == {
        "flash_mla": "vllm._flashmla_C",
        "deep_gemm": "vllm.third_party.deep_gemm",
        "fa3": "vllm.vllm_flash_attn._vllm_fa3_C",
    }
    assert "vllm" not in sys.modules


def test_a_library_for_another_architecture_gives_that_reason(site: Site) -> None:
    site.add({"flashinfer/__init__.py": ""}, distribution="flashinfer-python", version="0.6.14")
    library = probe().libraries["trtllm"]
    assert (library.available, library.version) == (False, "0.6.14")
    assert library.reason == "its kernels are built for SM100 to SM109; this device is SM90"


def test_a_cpu_is_probed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    probe.cache_clear()
    device = probe()
    probe.cache_clear()
    assert (device.kind, device.sm, device.smem_per_block) == ("cpu", 0, 0)
    assert device.memory_total >= device.memory_free > 0
    assert device.libraries["reference"].available
    assert device.libraries["reference"].version == torch.__version__
    assert {library.reason for name, library in device.libraries.items() if name != "reference"} == {
        "needs an NVIDIA GPU; this device is a CPU"
    }


def test_without_torch_the_device_is_unknown_and_not_called_a_cpu(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]  # makes `import torch` fail
    device = probe()
    assert (device.kind, device.where) == ("unknown", "an unknown device")
    assert device.describe() == "torch is not installed, so the device is unknown"
    assert {(library.available, library.reason) for library in device.libraries.values()} == {(False, device.name)}


def test_an_emulated_gpu_has_its_own_reasons() -> None:
    device = synthetic(90)
    broken = replace(device.libraries["fa3"], available=False, capabilities=(), reason="it does not import")
    found = emulating(replace(device, libraries=device.libraries | {"fa3": broken}), 86).libraries
    assert "this device is SM86" in found["trtllm"].reason == emulating(device, 86).libraries["trtllm"].reason
    assert found["fa3"].reason == "it does not import"
    assert found["cuda"].available
