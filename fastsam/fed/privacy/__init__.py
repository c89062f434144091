"""Differential privacy of whole clients: displacements of bounded length, noise on their sum, and what the two
guarantee (docs/privacy.md)."""
