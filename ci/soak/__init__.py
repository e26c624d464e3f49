"""The soak: a real server with the plugin under the load of real traffic, and then a killed worker.

``make soak`` runs it on vLLM's CPU build; ``python -m ci.soak --engine sglang`` or ``--engine vllm`` on a GPU.
"""
