"""The suites: each module makes the cases of a family of ops into workloads."""
