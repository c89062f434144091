"""Evidence on MNIST-1D: equally many trials for each method, on other seeds and samples than the report's."""

import pytest
import torch

from bench import __main__ as command
from bench import evidence, report
from bench import record as records

pytestmark = pytest.mark.of_each_kind


def test_every_method_has_equally_many_trials() -> None:
    assert {len(list(method.trials())) for method in evidence.METHODS.values()} == {9}
    assert all(task.seeds <= evidence.FIRST_TUNING_SEED for task in evidence.TASKS.values())


def test_labels_are_wrong_only_in_training() -> None:
    (x, y), (x_test, y_test) = evidence.split(0.4, is_tuning=False)
    (_, right), test = evidence.split(0.0, is_tuning=False)
    assert (
        len(x) == 4000 and x.shape[1:] == (evidence.LENGTH,) and abs(float((y != right).double().mean()) - 0.4) < 0.03
    )
    assert torch.equal(x_test, test[0]) and torch.equal(y_test, test[1])
    (_, tuning), held_out = evidence.split(0.4, is_tuning=True)
    assert len(tuning) + len(held_out[1]) == 4000 and torch.equal(held_out[1], right[: evidence.HELD_OUT])


@pytest.mark.parametrize("name", evidence.METHODS)
def test_a_method_trains(name: str) -> None:
    """A tenth of the steps takes the MLP of the paper well above a guess."""
    trial = list(evidence.METHODS[name].trials())[4]
    accuracy = evidence.run(evidence.TASKS["mlp-0"], evidence.METHODS[name], trial, 0, evidence.STEPS // 10)
    assert accuracy > 0.35


def test_a_run_depends_on_its_seed_alone() -> None:
    task, method = evidence.TASKS["mlp-20"], evidence.METHODS["SAM, late"]
    trial = next(method.trials())
    one, two, other = (evidence.run(task, method, trial, seed, 60) for seed in (0, 0, 1))
    assert one == two != other


@pytest.mark.slow
def test_the_command_writes_rows_that_a_page_shows(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    arguments = ["evidence", "--quick", "--cases", "1d/mlp-0", "1d-rho/mlp-0", "--rows", "SGD", "rho 0.1"]
    assert command.main([*arguments, "--out", str(tmp_path)]) == 0
    record = records.read(tmp_path / "evidence.json")
    (row,) = record["cases"][0]["rows"]
    assert len(row["grid"]) == 9 and len(row["steps"]["accuracy"]) == 2 and row["hours"] > 0 and row["peak_mib"] > 0
    page = report.short(record)
    assert "difference to SGD" in page and "Accuracy of SAM in percent by its radius" in page
