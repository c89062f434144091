"""`fastsam bench`: what it prints, that both contenders compute the same, and what a machine without a GPU gets."""

import re

import pytest
import torch

from fastsam import FusedSAM, fed
from fastsam.lab import bench, cli

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the MLP, few clients and short turns."""
    monkeypatch.setattr(bench, "MODELS", {"MLP": bench.MODELS["MLP"]})
    monkeypatch.setattr(bench, "OF_ROUNDS", ("MLP",))
    for name, value in {"CLIENTS": 6, "COHORT": 3, "SECONDS": 0.01, "SAMPLE": 0.001, "ROUNDS": (2, 2)}.items():
        monkeypatch.setattr(bench, name, value)


def test_two_tables_and_a_line_for_an_issue(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [re.fullmatch(r"  MLP +(\S+ ms) +(\S+ ms) +(\d+\.\d\d)", line) for line in lines]
    figures = [row.groups() for row in rows if row]
    assert len(figures) == 2
    for theirs, ours, ratio in figures:
        theirs_ms, ours_ms = (float(time.removesuffix(" ms")) for time in (theirs, ours))
        assert theirs_ms > 0 and float(ratio) == pytest.approx(ours_ms / theirs_ms, abs=0.01 + 0.01 * float(ratio))
    step, round_ = ((theirs, ours) for theirs, ours, _ in figures)
    assert lines[-1].startswith("for an issue: ") and f"torch {torch.__version__}" in lines[-1]
    assert f"step of SAM, MLP: {step[0]}, {step[1]}; round of FedSAM, MLP: {round_[0]}, {round_[1]}" in lines[-1]
    assert lines[0] in lines[-1] and f"threads: {torch.get_num_threads()}" in lines[0]


def test_steps_that_compute_something_else_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = bench.time_steps("MLP", CPU, 0.0)
    assert theirs > 0 and ours > 0
    options = {"rho": bench.RHO, "lr": 10 * bench.LR}
    monkeypatch.setattr(bench, "fused", lambda model: FusedSAM(model.parameters(), torch.optim.SGD, **options))
    with pytest.raises(RuntimeError, match="MLP: the copied class has the loss .* after two steps, fastsam"):
        bench.time_steps("MLP", CPU, 0.0)


def test_the_plain_loop_trains_as_fedsam_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BATCH", bench.MOST)  # so that no order matters
    clients, model = bench.clients_of("MLP", CPU), bench.make_model("MLP", CPU)
    options = {"rounds": 2, "cohort": len(clients), "lr": bench.LR, "batch_size": bench.BATCH, "test": clients[0]}
    expected = fed.run(model, clients, fed.FedSAM(rho=bench.RHO), **options, progress=False).model
    for _ in range(2):
        bench.plain_round(model, clients)
    start = bench.make_model("MLP", CPU)
    for p, q, old in zip(model.parameters(), expected.parameters(), start.parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-5 < (p - old).abs().max()


@pytest.mark.parametrize(("version", "words"), [(None, "is built without CUDA"), ("13.0", "sees no GPU. `nvidia-smi`")])
def test_without_a_gpu_it_says_what_is_missing(
    version: str | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--device", "cuda"]) == 1
    output = capsys.readouterr()
    assert words in output.err and "--device cpu" in output.err and not output.out
    assert bench.device_of(None) == CPU
