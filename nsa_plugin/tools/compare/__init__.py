"""Comparisons: an engine's server, stock and with the plugin, on one machine.

`runner.EngineComparison` starts a server for each role (`role_server`, `lifecycle`), sends one workload to each
(`workload`), times them (`load`) and keeps the measurements (`measured`). `rule` and `verdict` judge them,
`record` makes the benchmark record and `report` the tables. `cross_engine` compares two engines. `demo` compares one
server with the float32 reference.
"""
