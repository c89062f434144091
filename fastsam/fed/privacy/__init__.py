"""Differential privacy of whole clients: clipped deltas, noise on their sum, and the guarantee (docs/privacy.md)."""
