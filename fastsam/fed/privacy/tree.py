"""Noise of the rounds as a binary tree has it: Kairouz, McMahan, Song, Thakkar, Thakurta and Xu, "Practical and Private
(Deep) Learning Without Sampling or Shuffling", ICML 2021 (DP-FTRL, Algorithms 1 and 2).

Published are the sums of the rounds 1..k of an epoch, all k. The rounds are leaves, each node has noise of its own, and
the sum of k rounds has that of the nodes which cover 1..k, one for each bit of k. The server adds one round at a time,
so a round's noise is what its sum has more than the one before: it takes out again the smaller nodes of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator


def changes(k: int) -> Iterator[tuple[int, int, int]]:
    """The nodes in which the cover of the leaves 1..k differs from that of 1..k-1, k >= 1: (1 or -1, level, which of
    its level).

    Node j of level l covers the leaves (j - 1) * 2^l + 1 .. j * 2^l.
    """
    top = (k & -k).bit_length() - 1  # zeros at the end of k: ones at the end of k - 1
    yield 1, top, k >> top
    for level in range(top):
        yield -1, level, (k - 1) >> level
