"""Learning rates by round, compared with rates that are written down."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

from fastsam import fed
from tests.helpers.fed_input import start as start_small
from tests.helpers.fed_rundir import records, start
from tests.helpers.fed_runs import same_bits


def test_a_formula_a_function_and_a_scheduler_of_torch_are_the_decay_that_they_say(tmp_path):
    decayed_result = start(tmp_path / "decay", lr=0.2, lr_decay=0.5)
    for i, lr in enumerate(
        (
            "0.2*0.5**(round - 1)",
            lambda t: 0.2 * 0.5**t,
            fed.TorchSchedule(0.2, lambda opt: ExponentialLR(opt, gamma=0.5)),
        )
    ):
        run = start(tmp_path / f"{i}", lr=lr)
        assert same_bits(run.model, decayed_result.model) and records(tmp_path / f"{i}") == records(tmp_path / "decay")
    constant_run = start(tmp_path / "constant", lr=0.2)
    assert not same_bits(constant_run.model, decayed_result.model)


def test_a_scheduler_of_torch_takes_a_step_a_round():
    result = start_small(rounds=6, lr=fed.TorchSchedule(0.1, lambda opt: CosineAnnealingLR(opt, T_max=5, eta_min=0.01)))
    expected_value = [0.01 + 0.09 * (1 + math.cos(math.pi * t / 5)) / 2 for t in range(6)]
    assert [record["lr"] for record in result.history] == pytest.approx(expected_value)


def test_the_servers_rate():
    """A round at rate 0 leaves the model as it is; a formula knows the clients' rate."""
    short_run = start_small(rounds=1)
    two = start_small(rounds=2, server_lr=lambda t: 1.0 - t)
    assert same_bits(short_run.model, two.model) and [r["server_lr"] for r in two.history] == [1.0, 0.0]
    assert "server_lr" not in short_run.history[0]
    formula = start_small(rounds=3, lr="0.2/round", server_lr="lr/first_lr")
    assert [r["server_lr"] for r in formula.history] == pytest.approx([1, 1 / 2, 1 / 3])


def test_the_rate_of_the_first_round_is_what_an_algorithm_is_told():
    class Asks(fed.FedAvg):
        def local_step(self, server, client, round):
            records.append((round.index, round.lr, round.first_lr, round.server_lr))
            return super().local_step(server, client, round)

    records = []
    start_small(algorithm=Asks(), rounds=2, lr=lambda t: 0.5 - 0.1 * t, server_lr="2/round")
    assert records[-2:] == [(0, 0.5, 0.5, 2.0), (1, 0.4, 0.5, 1.0)]


@pytest.mark.filterwarnings("error")
def test_a_schedule_of_torch_may_be_asked_in_any_order():
    rate = fed.TorchSchedule(1.0, lambda opt: ExponentialLR(opt, gamma=0.5))
    assert [rate(3), rate(0), rate(1)] == [0.125, 1.0, 0.5] and torch.is_grad_enabled()


def test_a_run_is_not_resumed_with_another_function(tmp_path):
    """Functions of one name look equal, but their values in finished rounds differ."""
    options = [{"lr": lambda t, k=k: 0.1 if t < 2 else k} for k in (0.1, 0.2)]
    start(tmp_path / "run", rounds=3, **options[0])
    with pytest.raises(fed.RunDirectoryError, match="with another lr: in round 3 it was 0.1, now it is 0.2"):
        start(tmp_path / "run", rounds=4, resume=True, **options[1])
    start(tmp_path / "run", rounds=4, resume=True, **options[0])


# --- A number of local steps in place of epochs, and epochs without their last part of a batch.


def batches(samples: int, **options: object) -> list[list[int]]:
    """The batches of one client whose samples are numbered, in stored order."""
    records = []

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        records.append(y.long().tolist())
        return output.sum() * 0

    sample_numbers = torch.arange(float(samples))
    run_options = {"shuffle": False, "batch_size": 3, "loss": loss, "executor": "sequential", **options}
    record = start_small(clients=[(torch.zeros(samples, 6), sample_numbers)], rounds=1, **run_options).history[0]
    return records[-record["steps"] :]  # after the batches of the trial step


@pytest.mark.parametrize(
    ("samples", "options", "expected_value"),
    [
        (7, {"local_epochs": 2}, [[0, 1, 2], [3, 4, 5], [6]] * 2),
        (7, {"local_steps": 5}, [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2], [3, 4, 5]]),
        (7, {"local_steps": 2}, [[0, 1, 2], [3, 4, 5]]),
        (2, {"local_steps": 3}, [[0, 1]] * 3),
        (7, {"drop_last": True, "local_epochs": 2}, [[0, 1, 2], [3, 4, 5]] * 2),
        (6, {"drop_last": True}, [[0, 1, 2], [3, 4, 5]]),
        (2, {"drop_last": True}, [[0, 1]]),
        (7, {"drop_last": True, "local_steps": 3}, [[0, 1, 2], [3, 4, 5], [0, 1, 2]]),
    ],
)
def test_the_batches_of_a_client(samples, options, expected_value):
    assert batches(samples, **options) == expected_value
