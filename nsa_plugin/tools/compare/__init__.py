"""The comparison: an engine's own server, stock and with the plugin, on one machine.

`runner.Comparison` starts a server for each role (`serving`, `lifecycle`), sends one workload to each (`workload`,
`client`), times them (`load`, `turns`) and keeps what it measured (`measured`); `rule` judges it, `record` makes the
benchmark record of it and `report` the tables. `beside` judges one engine's answers beside another's. What is one
engine's own is in `sglang_server` and `vllm_server`, behind `engine.ServedEngine`.
"""
