"""Head/token all-to-all on the GPUs of a host: `torchrun --nproc-per-node 8 -m nsa_plugin.tools.bench.group`."""
