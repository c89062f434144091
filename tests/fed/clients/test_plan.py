"""The samples of clients in a round: every kind of clients has the batches of a loop written by hand."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fastsam import fed
from fastsam.fed.clients.plan import SampleOptions, Work, places_of, plan
from fastsam.fed.clients.population import Population
from fastsam.fed.clients.prepare import prepare
from fastsam.fed.common import seeds
from tests.helpers.fed_kinds import Rows, in_another_collate, pairs

ROUND, BATCH = 3, 4
KINDS: dict[str, Any] = {
    "store": pairs,
    "own memory": lambda: [(torch.cat([x] * (i + 1), 1), y) for i, (x, y) in enumerate(pairs())],  # unlike shapes
    "loaders": lambda: [DataLoader(Rows(x, y), collate_fn=in_another_collate) for x, y in pairs()],
    "lazy": lambda: fed.LazyClients(4, lambda i: pairs()[i]),
}
OPTIONS = {
    "epochs": {"local_epochs": 2},
    "drop_last": {"local_epochs": 2, "drop_last": True},
    "stored order": {"shuffle": False},
    "steps": {"local_steps": 7},
    "few steps": {"local_steps": 2, "drop_last": True},
}


def population_of(kind: str) -> Population:
    return prepare(KINDS[kind](), None, torch.float32, torch.device("cpu"))


def works_of(population: Population, clients: list[int], **options: Any) -> list[Work]:
    works = []
    for work in plan(population, SampleOptions(batch_size=BATCH, seed=5, **options), ROUND, clients, at_once=3):
        work.open()
        works.append(work)
    return works


def batches_by_hand(
    client: int,
    epochs: range,
    local_steps: int | None = None,
    drop_last: bool = False,
    shuffle: bool = True,
    local_epochs: int = 1,
) -> list[list[int]]:
    """Return the places of the samples of each batch of a client."""

    def batches() -> Iterator[list[int]]:
        n = 10 + client
        for epoch in epochs:
            order = seeds.permutations([client], [n], 5, "shuffle", ROUND, epoch)[0].tolist() if shuffle else range(n)
            parts = [list(order)[i : i + BATCH] for i in range(0, n, BATCH)]
            yield from (part for part in parts if not drop_last or len(part) == BATCH)

    return list(batches())[:local_steps]


def labels_of(batch: Any) -> Tensor:
    x, y = batch
    labels: Tensor = x[1] if y is None else y
    return labels


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_loop_by_hand(kind: str, options: dict[str, Any]) -> None:
    clients, population = [2, 0, 3, 1], population_of(kind)
    for client, work in zip(clients, works_of(population, clients, **options), strict=True):
        epochs = range(options.get("local_epochs", 9 if "local_steps" in options else 1))
        expected = batches_by_hand(client, epochs, **options)
        y = pairs()[client][1]
        assert [labels_of(batch).tolist() for batch in work.batches()] == [y[places].tolist() for places in expected]
        assert list(work.batch_sizes()) == [len(places) for places in expected]
        assert len(expected) == SampleOptions(batch_size=BATCH, **options).steps_of(len(y)) <= len(epochs) * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_gets_further_epochs_in_new_orders(kind: str) -> None:
    for client, work in enumerate(works_of(population_of(kind), [0, 1, 2, 3], local_epochs=1)):
        y = pairs()[client][1]
        for done, epochs in ((0, None), (1, 2), (3, None)):
            more = work.more(done, epochs)
            expected = batches_by_hand(client, range(done, done + (epochs or 1)))
            assert [labels_of(batch).tolist() for batch in more.batches()] == [y[one].tolist() for one in expected]
            assert len(more.epochs) == (epochs or 1)


@pytest.mark.parametrize("kind", KINDS)
def test_all_samples_come_once_in_stored_order(kind: str) -> None:
    for client, work in enumerate(works_of(population_of(kind), [0, 1, 2, 3])):
        batches = list(work.full_batches(5))
        assert torch.equal(torch.cat([labels_of(pair) for *pair, _ in batches]), pairs()[client][1])
        assert [n for *_, n in batches] == [5, 5, client][: 2 + (client > 0)]


@pytest.mark.parametrize("clients", [[0, 1, 2], [2, 1], [0, 1, 2, 3], [1, 3]], ids=str)
def test_orders_of_several_clients_are_their_own(clients: list[int]) -> None:
    """Clients that were planned together, some of them, and clients of two plans, from any sample on."""
    population, options = population_of("store"), {"local_epochs": 2, "drop_last": True}
    works = [works_of(population, [0, 1, 2, 3], **options)[i] for i in clients]
    together = works_of(population, [0, 1, 2, 3], **options)
    for chosen in (works, [together[i] for i in clients]):
        offsets = [3 * i for i in range(len(chosen))]
        indices, begins = places_of(chosen, offsets)
        for work, offset, begin in zip(chosen, offsets, begins, strict=True):
            expected = torch.cat([work.order(epoch) for epoch in work.epochs])[offset:]
            assert torch.equal(indices[begin : begin + len(expected)], expected)


@pytest.mark.parametrize("width", [64, 3])
def test_few_bytes_are_gathered_at_once(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block stays whole if parts would begin elsewhere in memory, which changes the last bits of float32."""
    clients = [(torch.randn(50, width), torch.zeros(50, dtype=torch.int64))]
    population = prepare(clients, None, torch.float32, torch.device("cpu"))

    def batches() -> list[Tensor]:
        (work,) = works_of(population, [0])
        return [x for x, _ in work.batches()]

    blocks = batches()
    monkeypatch.setattr(fed.clients.plan, "MAX_GATHERED", 2 * BATCH * (4 * width + 8))
    parts = batches()
    assert all(map(torch.equal, blocks, parts)) and len(parts) == 13
    gathered = max(x.untyped_storage().nbytes() for x in parts)
    assert gathered == (2 * BATCH if width == 64 else 50) * 4 * width
