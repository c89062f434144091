"""A classifier of texts with attention, and clients with texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, HEADS, WIDTH, CLASSES = 11, 2, 16, 3


class Reader(nn.Module):
    """A classifier of texts, in which the words of 0 are padding."""

    def __init__(self, is_masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        self.is_masked = is_masked

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inner(self.words(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mask = (x > 0)[:, None, None, :] if self.is_masked else None
        y: Tensor = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        output: Tensor = self.head(y.transpose(1, 2).flatten(2).mean(1))
        return output


def texts(sizes: Sequence[int], length: int) -> list[tuple[Tensor, Tensor]]:
    """Return clients with these numbers of texts, each of at most `length` words, and the classes of the texts."""
    draw, clients = torch.Generator().manual_seed(0), []
    for n in sizes:
        ends = torch.randint(1, length + 1, (n, 1), generator=draw)
        words = torch.randint(1, WORDS, (n, length), generator=draw) * (torch.arange(length) < ends)
        clients.append((words, torch.randint(CLASSES, (n,), generator=draw)))
    return clients
