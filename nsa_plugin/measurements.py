"""Made by `python -m ci.measured` from docs/benchmarks; change nothing here.

Microseconds of one call: {(SM version, op, layout): {route: {heads: ((rows, microseconds), ...)}}}.
"""

MEASUREMENTS: dict[tuple[int, str, str], dict[str, dict[int, tuple[tuple[int, float], ...]]]] = {}
