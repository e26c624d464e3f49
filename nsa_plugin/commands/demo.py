"""``nsa-plugin demo``: serve a small model with a real engine and compare every token."""

from nsa_plugin.tools.compare.demo.run import add_arguments
from nsa_plugin.tools.compare.demo.run import run_demo as run

__all__ = ["add_arguments", "run"]
