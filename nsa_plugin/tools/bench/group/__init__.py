"""Heads for tokens, measured over the GPUs of a host: `torchrun --nproc-per-node 8 -m nsa_plugin.tools.bench.group`."""
