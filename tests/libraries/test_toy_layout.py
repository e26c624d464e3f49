"""A KV layout is added with its description in layouts.py; the reference reads and writes it without a change.

The test loads a copy of layouts.py with one more description, in a separate process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nsa_plugin import layouts

TOY = """
TOY_FP8 = Fp8Layout(
    name="toy_fp8",
    families=("v3.2",),
    fp8_dim=512,
    bf16_dim=64,
    tile=32,
    scale_format=ScaleFormat.UE8M0,
    scale_slot_bytes=16,
    scales_after_page=True,
    page_alignment=64,
    amax_floor=1e-4,
)

"""

CODE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("nsa_plugin.layouts", sys.argv[1])
layouts = importlib.util.module_from_spec(spec)
sys.modules["nsa_plugin.layouts"] = layouts
spec.loader.exec_module(layouts)

import torch
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.kernels.kv_cache import allocate_cache
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.libraries.registry import Registry
from nsa_plugin.settings import Settings

assert layouts.FAMILY_LAYOUTS == {"v3.2": ("bf16", "v32_fp8", "toy_fp8"), "v4": ("bf16", "v4_fp8")}
assert synthetic(0).has("reference", Op.SPARSE_MLA_DECODE, "toy_fp8")
assert not synthetic(90).has("flash_mla", Op.SPARSE_MLA_DECODE, "toy_fp8")

model = ModelShape(kv_layout="toy_fp8")
assert model.fp8_cache
batch = BatchShape(phase=Phase.DECODE, num_requests=1, num_tokens=1, max_kv_len=4096, total_kv_len=4096)
assert decide(model, batch, synthetic(0), Settings()).provider == "reference"
assert decide(model, batch, synthetic(90), Settings(decode_backend="reference")).provider == "reference"

cache, slots = allocate_cache("toy_fp8", 2, 16), torch.tensor([3, 17, 31])
rows = torch.randn(3, 576, generator=torch.Generator().manual_seed(0))
registry = Registry()
registry.load("kv_cache_write", "reference")(cache, rows, slots)
read = registry.load("kv_cache_read", "reference")(cache, slots, dtype=torch.float32)
torch.testing.assert_close(read, rows, rtol=2**-3, atol=2**-8)
torch.testing.assert_close(read[:, 512:], rows[:, 512:].bfloat16().float(), rtol=0, atol=0)
"""


def test_a_described_layout_reaches_families_profiles_decisions_and_the_reference(tmp_path: Path) -> None:
    source = Path(layouts.__file__).read_text()
    assert "for layout in (BF16, V32_FP8, V4_FP8)}" in source
    described = source.replace("LAYOUTS: dict[str, CacheLayout]", TOY + "LAYOUTS: dict[str, CacheLayout]", 1)
    described = described.replace(
        "for layout in (BF16, V32_FP8, V4_FP8)}", "for layout in (BF16, V32_FP8, V4_FP8, TOY_FP8)}"
    )
    (tmp_path / "layouts.py").write_text(described)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "layouts.py")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
