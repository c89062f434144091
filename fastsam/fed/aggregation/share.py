"""Numbers of clients from shares."""

from __future__ import annotations

from math import ceil


def of_clients(share: float, n: int) -> int:
    """The least whole number of clients that is `share * n` or more; 0.1 of 30 are 3, whatever the product's last bit
    says."""
    return ceil(share * n - 1e-9)
