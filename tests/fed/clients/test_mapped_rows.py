"""Clients whose columns lie in files: read a batch at a time, the next one ahead, with the bits of columns in
memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsam import fed
from fastsam.fed.clients import prepare as preparing
from fastsam.fed.clients.mapped_rows import one_ahead
from fastsam.fed.clients.prepare import prepare
from tests.helpers.fed_kinds import OfParts, pairs, run, weights


class Counted(np.memmap):
    """Remembers, with its parts, how many rows each reading had."""

    taken: list[int]

    def __array_finalize__(self, made_of: Any) -> None:
        super().__array_finalize__(made_of)
        self.taken = getattr(made_of, "taken", [])

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.taken.append(len(index) if isinstance(index, list) else 1)
        return found


def in_files(folder: Path) -> list[tuple[Any, Any]]:
    made = []
    for i, (x, y) in enumerate(pairs()):
        np.save(folder / f"{i}.npy", x.numpy())
        column = np.load(folder / f"{i}.npy", mmap_mode="r").view(Counted)
        made.append((column, y))
    return made


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all clients together were larger than what is read into memory."""
    monkeypatch.setattr(preparing, "LARGEST_READ", 1000)


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_the_bits_are_those_of_columns_in_memory(tmp_path: Path, large: None, executor: str) -> None:
    clients, plain = in_files(tmp_path), run(pairs(), executor="sequential")
    assert torch.equal(weights(run(clients, executor=executor)), weights(plain))
    assert all(max(x.taken) <= 5 < len(x) for x, _ in clients), "a batch at a time"
    assert torch.equal(weights(run(fed.Lazy(len(clients), clients.__getitem__), executor=executor)), weights(plain))


def test_a_look_reads_only_the_first_samples(tmp_path: Path, large: None) -> None:
    clients = in_files(tmp_path)
    made = prepare(clients, None, torch.float32, torch.device("cpu"))
    assert made.samples is not None and all(max(x.taken) <= 2 for x, _ in clients), [x.taken for x, _ in clients]
    assert all(own.ahead and not own.draws for own in made.samples)  # type: ignore[attr-defined]


def test_trees_of_columns(tmp_path: Path, large: None) -> None:
    plain = run(pairs(), executor="sequential")
    clients = [((x[:, :3], x[:, 3:]), y) for x, y in in_files(tmp_path)]
    assert torch.equal(weights(run(clients, model=OfParts(), test=None)), weights(plain))


def test_small_ones_are_read_once(tmp_path: Path) -> None:
    made = prepare(in_files(tmp_path), None, torch.float32, torch.device("cpu"))
    assert made.samples is None and torch.equal(made.clients[0][0], pairs()[0][0])


def test_columns_of_unequal_length(tmp_path: Path) -> None:
    ((x, y), *_) = in_files(tmp_path)
    with pytest.raises(ValueError, match=r"client 0: columns must have one number of samples, 0 has \d+, 1 has \d+"):
        run([(x, y[1:])])


# --- one ahead ---


def test_one_is_made_while_the_last_one_is_used() -> None:
    begun, here = [threading.Event() for _ in range(3)], threading.get_ident()

    def make(i: int) -> tuple[int, int]:
        begun[i].set()
        return i, threading.get_ident()

    asked: list[int] = []

    def makers() -> Iterator[Callable[[], tuple[int, int]]]:
        for i in range(3):
            asked.append(i)
            yield partial(make, i)

    for i, (made, thread) in enumerate(one_ahead(makers())):
        assert made == i and thread != here
        assert asked == list(range(min(i + 2, 3))), "one ahead, no more"
        assert i == 2 or begun[i + 1].wait(10)


def test_what_a_making_raises_comes_in_its_turn() -> None:
    made = one_ahead([lambda: 1, lambda: 1 // 0])
    assert next(made) == 1
    with pytest.raises(ZeroDivisionError):
        next(made)


def test_nothing_to_make() -> None:
    assert list(one_ahead([])) == []
