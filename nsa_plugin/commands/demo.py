"""``nsa-plugin demo``: serve a small model with a real engine and compare every token; see `nsa_plugin.tools.demo`."""

from nsa_plugin.tools.demo.run import add_arguments
from nsa_plugin.tools.demo.run import run_demo as run

__all__ = ["add_arguments", "run"]
