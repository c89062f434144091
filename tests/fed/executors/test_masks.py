"""Models that read their attention mask in Python, and make numbers on the device: their steps are captured, with the
bits of `sequential`. A stand-in takes the place of CUDA, and raises if the host would wait in a trial or a capture."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.executors import stacked_masks
from tests.helpers.attending import CLASSES, WIDTH, WORDS, texts
from tests.helpers.fake_cuda import FakeCuda, Watch
from tests.helpers.fed_runs import digest

LENGTH = 5


class Encoder(nn.Module):
    """A model that leaves out a mask without padding, as Hugging Face's do. Eager attention adds a mask of numbers."""

    def __init__(self, is_eager: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.is_eager = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES), is_eager

    def forward(self, words: Tensor) -> Tensor:
        x, mask = self.words(words), (words > 0)[:, None, :]
        if not torch.compiler.is_compiling() and bool(mask.all()):
            mask = None
        elif self.is_eager:
            zero = torch.tensor(0.0, device=x.device, dtype=x.dtype)
            mask = torch.where(mask, zero, torch.finfo(x.dtype).min)
        output: Tensor = self.head(F.scaled_dot_product_attention(x, x, x, attn_mask=mask).mean(1))
        return output


Encoder.__module__ = "transformers.models.encoder"


def train(executor: str, is_eager: bool, **options: Any) -> str:
    clients = [*texts((7, 10), LENGTH), (torch.ones(8, LENGTH, dtype=torch.int64), torch.arange(8) % CLASSES)]
    keywords = {"rounds": 3, "batch_size": 4, "local_epochs": 2, "participation": 1.0, "backend": "reference"} | options
    return digest(fed.run(Encoder(is_eager), clients, fed.FedSAM(rho=0.05), executor=executor, **keywords))


@pytest.fixture
def like_gpu(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes keep masks as on a GPU, and the host may not wait."""
    monkeypatch.setattr(FakeCuda, "waits", False)
    monkeypatch.setattr(stacked_masks, "masks_of_passes", lambda module, device: stacked_masks.kept_masks(module))


@pytest.mark.usefixtures("like_gpu")
@pytest.mark.parametrize("is_eager", [False, True])
def test_steps_are_captured_with_the_bits_of_the_plain_executor(is_eager: bool) -> None:
    expected = train("sequential", is_eager)
    with Watch():
        assert train("graph", is_eager) == expected
    assert sum(graph.replays for graph in FakeCuda.graphs) > 0


@pytest.mark.usefixtures("like_gpu")
def test_a_number_of_the_host_is_refused_where_no_device_is_named() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.tensor([2.0], device=x.device)

    with pytest.raises(ValueError, match=r"looks at values on the host in test_masks\.py, line"):
        fed.run(Scaled(4, 3), [(torch.randn(8, 4), torch.arange(8) % 3)], fed.FedAvg(), executor="graph", rounds=1)


def test_a_context_of_kept_masks_ends() -> None:
    context = stacked_masks.kept_masks(Encoder(is_eager=False))
    for _ in range(2):
        with context:
            assert torch.compiler.is_compiling()
        assert not torch.compiler.is_compiling()
    with pytest.raises(ValueError, match="inside"), context:
        raise ValueError("inside")
    assert not torch.compiler.is_compiling()
