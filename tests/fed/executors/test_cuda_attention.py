"""Transformers of stacked clients with the attention of CUDA, emulated: one call for all rows, with gradients."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fastsam import fed
from fastsam.fed.executors import stacked_attention
from tests.helpers.attending import Reader, texts
from tests.helpers.cuda_attention import KERNELS, CudaAttention, cuda_attention
from tests.helpers.fed_runs import vector

ROWS, BATCH, HEADS, LENGTH, WIDTH = 3, 2, 4, 5, 8
SIZES = (12, 9, 12, 5)  # whole batches and partial ones


@pytest.fixture(params=KERNELS)
def attention(request: pytest.FixtureRequest) -> Iterator[CudaAttention]:
    with cuda_attention(request.param) as emulation:
        yield emulation


@pytest.mark.parametrize(("is_masked", "length"), [(True, 7), (False, 32)])
def test_stacked_clients_train_as_one_by_one(attention: CudaAttention, is_masked: bool, length: int) -> None:
    clients = texts(SIZES, length)
    models = []
    for executor in ("sequential", "vmap"):
        attention.calls.clear()
        models.append(
            fed.run(
                Reader(is_masked), clients, fed.FedSAM(rho=0.1), rounds=3, batch_size=4, lr=0.2, participation=1.0,
                executor=executor, slots=4,
            ).model
        )  # fmt: skip
    torch.testing.assert_close(*map(vector, models), rtol=1e-5, atol=1e-6)
    assert attention.calls[attention.kernel, 4 * 4] > 0 and attention.calls["backward", 4 * 4] > 0


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


QUERY, MASK = (normal(ROWS, BATCH, HEADS, LENGTH, n) for n in (WIDTH, LENGTH))
KEY = QUERY.flip(0)


@pytest.mark.parametrize("max_batch", [65_535, 4])
@pytest.mark.parametrize("dim", [0, None])
def test_a_users_vmap_has_its_values(
    attention: CudaAttention, dim: int | None, max_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that are too long for one call are split."""
    monkeypatch.setattr(stacked_attention, "MAX_BATCH", max_batch)
    stacked_attention.register()
    mask = MASK if dim == 0 else MASK[0]

    def function(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key.exp(), attn_mask=mask)

    query = QUERY.clone().requires_grad_()
    output = vmap(function, (0, 0, dim))(query, KEY, mask)
    rows = [function(query[i], KEY[i], MASK[i] if dim == 0 else mask) for i in range(ROWS)]
    assert torch.equal(output, torch.stack(rows))
    weights = normal(*output.shape)
    one, two = (torch.autograd.grad((out * weights).sum(), query)[0] for out in (output, torch.stack(rows)))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_dropout_of_a_users_vmap_is_not_shared_in_silence(attention: CudaAttention) -> None:
    stacked_attention.register()
    for randomness in ("error", "same"):
        with pytest.raises(RuntimeError, match="randomness='different'"):
            vmap(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), randomness=randomness)(QUERY)
