"""A client may be a pair, a data set, a loader, a tree of columns, or a list of samples: the same samples give the same
bits."""

from __future__ import annotations

import random
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fastsam import fed
from fastsam.fed.clients import prepare as preparing
from fastsam.fed.clients.prepare import prepare
from tests.helpers.fed_kinds import KINDS, OfParts, Rows, in_another_collate, model, pairs, run, weights

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_in_a_data_set_are_stacked_once_and_are_then_pairs(kind: str) -> None:
    made = prepare([KINDS[kind](x, y) for x, y in pairs()], KINDS[kind](*pairs()[0]), torch.float32, CPU)
    plain = prepare(pairs(), pairs()[0], torch.float32, CPU)
    assert made.samples is None and made.test_samples is None
    assert made.fingerprint() == plain.fingerprint()
    assert (made.store is None) == (plain.store is None)


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_samples_that_are_read_in_batches_give_the_bits_of_pairs(executor: str) -> None:
    plain = run(pairs(), executor="sequential")
    for options in (
        {"clients": [DataLoader(Rows(x, y), collate_fn=in_another_collate) for x, y in pairs()]},
        {"clients": [Rows(x, y) for x, y in pairs()], "collate": in_another_collate},
        {"clients": [TensorDataset(x, y) for x, y in pairs()], "collate": in_another_collate, "shuffle": True},
        {
            "clients": [Rows(x, y, "nested") for x, y in pairs()],
            "model": OfParts(),
            "test": Rows(*pairs()[3], "nested"),
        },
        {
            "clients": [((x[:, :3], x[:, 3:]), y) for x, y in pairs()],
            "model": OfParts(),
            "test": ((pairs()[3][0][:, :3], pairs()[3][0][:, 3:]), pairs()[3][1].to(torch.uint8)),
        },
    ):
        made = run(options.pop("clients"), executor=executor, **options)
        assert torch.equal(weights(made), weights(plain)), options
        for key in ("test_loss", "test_accuracy", "train_loss"):
            assert made.history[-1][key] == pytest.approx(plain.history[-1][key], rel=1e-6), (key, options)


def test_a_data_set_larger_than_the_limit_is_read_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(pairs(), executor="sequential")
    monkeypatch.setattr(preparing, "LARGEST_READ", 1000)
    clients = [Rows(x, y) for x, y in pairs()]
    made = prepare(clients, None, torch.float32, CPU)
    assert made.samples is not None and max(data.reads for data in clients) < 10, "looked at, not read"
    assert torch.equal(weights(run(clients)), weights(plain))


def noisy(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Samples that are others whenever they are read, by torch's, numpy's or Python's generator."""

    class Noisy(Rows):
        def __getitem__(self, i: int) -> Any:
            own, label = super().__getitem__(i)
            return own + torch.randn(6) * random.random() + np.random.rand(), label

    return Noisy(x, y)


def test_transforms_that_draw_are_drawn_anew_in_every_epoch_and_are_functions_of_the_seed() -> None:
    clients = [noisy(x, y) for x, y in pairs()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first = run(clients, slots=1)
    assert torch.equal(states[0], torch.get_rng_state()) and states[2] == random.getstate()
    assert (states[1] == np.random.get_state()[1]).all()
    assert first.summary()["executor"] == "sequential"
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert torch.equal(weights(run(clients)), weights(first)), "whatever was drawn before"
    assert not torch.equal(weights(run(clients, seed=1)), weights(first))
    with pytest.raises(ValueError, match="reading a batch draws random numbers"):
        run(clients, executor="threads")


def test_a_drawing_data_set_gives_other_numbers_in_another_epoch() -> None:
    seen: list[torch.Tensor] = []

    def look(m: Any, batch: Any) -> torch.Tensor:
        seen.append(batch[0].clone())
        return F.cross_entropy(m(batch[0]), batch[1])

    run(
        [noisy(*pairs()[0])],
        loss=fed.BatchLoss(look),
        rounds=1,
        local_epochs=2,
        batch_size=16,
        shuffle=False,
        test=None,
    )
    once, again = seen[2], seen[4]  # after the two of the trial; of a step's two passes the first
    assert torch.equal(seen[2], seen[3]) and not torch.equal(once, again)


def test_numbers_that_no_seed_reaches_are_refused() -> None:
    own = np.random.default_rng(0)

    class Noisy(Rows):
        def __getitem__(self, i: int) -> Any:
            return self.x[i] + own.random(), 0

    with pytest.raises(
        ValueError, match=r"client 1: sample 0 is another one when it is read again.*global generators|own generators"
    ):
        run([pairs()[0], Noisy(*pairs()[1])])


def test_a_user_dict_of_a_collate_and_strings_reach_the_loss() -> None:
    seen: list[Any] = []

    def look(m: Any, batch: Any) -> torch.Tensor:
        seen.append(batch)
        return F.cross_entropy(m(batch["x"]), batch["label"])

    data = [{"x": row.double().numpy(), "label": int(c), "name": "n"} for row, c in zip(*pairs()[0], strict=True)]
    run([data], loss=fed.BatchLoss(look), rounds=1, test=None)
    assert type(seen[0]) is dict and seen[0]["name"] == ["n"] * 4 and seen[0]["x"].dtype == torch.float32
    loader = DataLoader(data, collate_fn=lambda items: UserDict(in_another_collate(items)))
    run([loader], loss=fed.BatchLoss(look), rounds=1, test=None)
    assert type(seen[-1]) is dict and seen[-1]["label"].dtype == torch.int64


GOOD = pairs()[0]


def test_a_read_that_fails_before_the_run_names_client_and_sample() -> None:
    class Broken(Rows):
        def __getitem__(self, i: int) -> Any:
            raise OSError("no such file")

    with pytest.raises(ValueError, match="client 1: reading sample 0 failed: OSError: no such file"):
        run([GOOD, Broken(*GOOD)])


def test_a_read_that_fails_in_a_round_names_the_client_or_leaves_it_out() -> None:
    class Late(Rows):
        def __getitem__(self, i: int) -> Any:
            if self.reads > 30:
                raise OSError("gone")
            return super().__getitem__(i)

    def clients() -> list[Any]:
        return [Rows(*pairs()[0]), Late(*pairs()[1]), Rows(*pairs()[2])]

    with pytest.raises(fed.ClientError, match="client 1 failed in round 3, local step .*OSError: gone"):
        run(clients(), rounds=4, collate=in_another_collate)
    made = run(clients(), rounds=4, collate=in_another_collate, on_client_error="exclude")
    assert [[e["client"] for e in line["excluded"]] for line in made.history] == [[], [], [1], [1]]


def test_labels_all_ignored_are_said(caplog: pytest.LogCaptureFixture) -> None:
    x, y = pairs()[1]
    nothing = [(row, -100) for row in x]
    with pytest.raises(ValueError, match="client 1: all labels are -100"):
        run([GOOD, nothing])
    trees = [{"x": a, "labels": b} for a, b in (GOOD, (x, torch.full_like(y, -100)))]
    loss = fed.BatchLoss(lambda m, batch: F.cross_entropy(m(batch["x"]), batch["labels"]))
    made = run(trees, loss=loss, test=None, model=model())
    assert "11 of its 11 labels are -100" in made.history[0]["excluded"][0]["reason"]


def test_a_resumed_run_knows_its_data_again(tmp_path: Any) -> None:
    whole = run([Rows(x, y) for x, y in pairs()], collate=in_another_collate, rounds=3)
    options = {"collate": in_another_collate, "run_dir": tmp_path / "run"}
    run([Rows(x, y) for x, y in pairs()], rounds=1, **options)
    with pytest.raises(fed.RunDirectoryError, match="data"):
        run([Rows(x + 1, y) for x, y in pairs()], rounds=3, resume=True, **options)
    with pytest.raises(fed.RunDirectoryError, match="collate"):
        run(
            [Rows(x, y) for x, y in pairs()],
            rounds=3,
            resume=True,
            **options | {"collate": lambda i: in_another_collate(i)},
        )
    made = run([Rows(x, y) for x, y in pairs()], rounds=3, resume=True, **options)
    assert torch.equal(weights(made), weights(whole))
