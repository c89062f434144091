"""Variants of the CUDA kernels that are not in the library until a GPU has decided: built, gated and measured beside
today's kernels.

`python -m bench.variants --device cuda --out DIR` (part of `make gpu`). What they are: docs/kernels.md.
"""
