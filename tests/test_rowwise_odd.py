"""Row programs and unusual models, labels and words: the plain numbers, or another way to them."""

from __future__ import annotations

import fed_cases as cases
import pytest
import torch
from torch import Tensor, nn

from fastsam import fed
from fastsam_kernels import native

pytestmark = pytest.mark.skipif(native.why_not("cpu") is not None, reason=f"{native.why_not('cpu')}")


def soft(scores: Tensor, y: Tensor) -> Tensor:
    """Of labels that are numbers, `[batch]`; it has a row program."""
    return -(scores.log_softmax(1) * y.unsqueeze(1)).sum(1).mean()


def test_labels_that_are_numbers_train_like_one_client_after_the_other() -> None:
    torch.manual_seed(0)
    data = [(torch.randn(n, 6), torch.rand(n)) for n in (13, 13, 8, 1)]
    ends = []
    for executor in ("sequential", "vmap"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        fedsam = cases.ours("fedsam")
        done = fed.run(
            model, data, fedsam, executor=executor, loss=soft, rounds=3, batch_size=5, local_epochs=2, participation=1.0
        )
        ends.append(torch.cat([p.flatten() for p in done.model.state_dict().values()]))
    assert torch.allclose(*ends, rtol=0, atol=2e-5)
