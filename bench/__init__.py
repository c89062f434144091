"""Benchmarks: one harness (`bench.timing`, `bench.gate`, `bench.report`), started by `python -m bench.step` and by
`pytest bench/ --benchmark-only`."""
