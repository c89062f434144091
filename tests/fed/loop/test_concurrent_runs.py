"""Several runs in threads of one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import fed
from tests.helpers.fed_input import start
from tests.helpers.fed_runs import same_bits

DROPS = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
PLAIN = nn.Linear(6, 3)


class Beside(fed.Callback):
    """Starts a second run in another thread, or in this one, in the middle of the first."""

    def __init__(self, model: nn.Module, thread: bool) -> None:
        self.model, self.thread, self.made = model, thread, list[Any]()

    def on_round(self, run: Any, record: Any) -> None:
        if not self.thread:
            self._run()
            return
        thread = threading.Thread(target=self._run)
        thread.start()
        thread.join()

    def _run(self) -> None:
        try:
            self.made.append(start(self.model))
        except ValueError as error:
            self.made.append(error)


@pytest.mark.parametrize(("first", "second"), [(DROPS, PLAIN), (PLAIN, DROPS), (DROPS, DROPS)])
def test_runs_in_threads_of_which_one_draws(first: nn.Module, second: nn.Module) -> None:
    beside, state = Beside(second, thread=True), torch.get_rng_state()
    result = start(first, callbacks=[beside])
    assert "another fed.run is active in a thread of this process" in str(beside.made[0])
    assert same_bits(result.model, start(first).model) and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("model", "thread"), [(PLAIN, True), (DROPS, False)])
def test_runs_that_may_be_together(model: nn.Module, thread: bool) -> None:
    beside = Beside(model, thread)
    start(model, callbacks=[beside])
    assert isinstance(beside.made[0], fed.Result)
