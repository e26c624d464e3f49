"""The kill switch. Engines read it in every process that they start, so this imports next to nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

ENV_PREFIX = "NSA_PLUGIN_"
# Under SGLang: the variable that passes flags on, and the module that only a scheduler has loaded.
VARIABLE = "_NSA_PLUGIN_SGLANG"
SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
FALSE = ("0", "false", "no", "off")


def killed(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the kill switch, ``NSA_PLUGIN_ENABLED=0``, is set; never raises."""
    value = (os.environ if environ is None else environ).get(f"{ENV_PREFIX}ENABLED", "")
    return value.strip().lower() in FALSE
