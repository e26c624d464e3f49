"""The demo: a real engine serves a small DeepSeek-V3.2 through the plugin, and every token is checked.

It is a comparison whose baseline is the float32 reference model instead of a stock server. `workload` has requests for
every execution path, `pipeline` serves and compares them by the comparison's rule, `trace` and `checks` see which paths
the run took, and `report` prints the result.
"""
