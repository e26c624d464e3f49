"""The commands of ``nsa-plugin``, one module each; see `nsa_plugin.cli`."""
