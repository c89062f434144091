"""Benchmarks. One harness (`bench.timing`, `bench.correctness`, `bench.report`) serves `python -m bench.step` and
`pytest bench/ --benchmark-only`."""
