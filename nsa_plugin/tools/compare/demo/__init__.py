"""The demo: a real engine serves a small DeepSeek-V3.2 through the plugin, and every token is checked.

`run.run_demo` writes a checkpoint (`checkpoint`), starts `vllm serve` (`server`), sends a workload that takes
every route (`requests`), compares all answers with an independent model (`reference_model`, `compare`) and
prints what happened (`trace`, `report`). It talks to the engine over HTTP alone and imports none.
"""
