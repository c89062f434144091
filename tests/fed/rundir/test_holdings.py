"""What lives in the files of clients' states, counted as it changes: as a count of everything says."""

from __future__ import annotations

import random

import pytest
import torch

from fastsam.fed.rundir.holdings import Holdings


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_everything_counted_anew(seed: int) -> None:
    rng, holdings = random.Random(seed), Holdings()
    files: dict[str, int] = {}
    clients: dict[int, tuple[dict[str, torch.Tensor], str]] = {}
    for step in range(60):
        file, shared = f"file {step}", torch.zeros(7)
        chosen = rng.sample(range(20), rng.randint(1, 6))
        states = {i: {"own": torch.zeros(rng.randint(1, 9)), "shared": shared, "again": shared} for i in chosen}
        files[file] = sum(s["own"].nbytes for s in states.values()) + shared.nbytes
        holdings.made(file, files[file])
        for i, state in states.items():
            if i in clients:
                holdings.drop(clients[i][1], clients[i][0])
            clients[i] = state, file
            holdings.add(file, state)
        if rng.random() < 0.3:
            gone = rng.choice(list(clients))
            holdings.drop(clients[gone][1], clients.pop(gone)[0])
        live: dict[str, dict[int, int]] = {}
        for state, name in clients.values():
            live.setdefault(name, {}).update((id(t), t.nbytes) for t in state.values())
        wanted = {name for name, own in live.items() if sum(own.values()) < 0.5 * files[name]}
        if rng.random() < 0.7:
            assert holdings.sparse() == wanted
    assert wanted, "some file must have become sparse"
