"""Benchmarks: `python -m bench QUESTION` and `pytest bench/ --benchmark-only`.

This module imports no package, because the programs of other simulators (bench/fed/peers.py) run without fastsam.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
