"""Benchmarks: one registry of cases (`bench.cases`), measured by `python -m bench.step` and by
`pytest bench/ --benchmark-only`."""
