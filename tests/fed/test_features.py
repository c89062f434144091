"""Features of a run in pairs and triples, drawn at random, against a plain loop in which each feature is some lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import fed
from fastsam.fed.clients.prepare import prepare
from fastsam.fed.executors import randomness
from fastsam.fed.loop.evaluate import client_slices
from tests.helpers import oracle
from tests.helpers.feature_cases import (
    BATCH,
    DTYPE,
    LOSSES,
    METRICS,
    MODELS,
    ON_GPU,
    OPTIMIZERS,
    SCHEDULES,
    Features,
    algorithm_of,
    data_of,
    draw,
)
from tests.helpers.feature_loop import CLIP, EPOCHS, ROUNDS, SHARE, Run

ALL = 300  # number of draws; `make test` runs a draw if it meets a new value of a feature
ACTIVE = [[0, 3, 4], [1, 2, 4], [0, 1, 2, 3]]


def loss_of_dict(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def predict_dict(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch["x"]), batch["y"]


def train(features: Features, executor: str, folder: Path) -> fed.Result:
    """Run fastsam with features, in a new run directory in `folder` if the run is resumed before the last round."""
    if not features.resumed:
        return run(features, executor)
    path = folder / executor
    run(features, executor, rounds=ROUNDS - 1, run_dir=path)
    return run(features, executor, run_dir=path, resume=True)


def run(features: Features, executor: str, rounds: int = ROUNDS, **options: Any) -> fed.Result:
    kind, (clients, test) = MODELS[features.model], data_of(features)
    data: list[Any] = list(clients)
    loss: Any = LOSSES[features.loss]
    test_set: Any = test
    if features.loss == "dicts":
        data, test_set = [{"x": x, "y": y} for x, y in clients], {"x": test[0], "y": test[1]}
        loss = fed.BatchLoss(loss_of_dict, predict_dict)
    keywords = OPTIMIZERS[features.optimizer][1] | SCHEDULES[features.schedule][1]
    return fed.run(
        kind.make(), data, algorithm_of(features), rounds=rounds, local_epochs=EPOCHS, batch_size=BATCH, test=test_set,
        sampler=lambda t, generator: ACTIVE[t], loss=loss, executor=executor, weighting=features.weighting,
        client_test_split="iid", metrics=METRICS[features.metric], slots=3,
        local_parameters=kind.head if features.personal else None,
        compression=fed.TopK(SHARE) if features.compression else None,
        privacy=fed.Privacy(clip=CLIP) if features.clip else None,
        buffers="average" if features.model == "batch norm" else None,
        measures=[] if features.measure == "none" else [features.measure], **keywords,
        **options,
    )  # fmt: skip


# Pairs of values that a run refuses before round 1, and a pattern of the message.
OWN_START = "local_parameters= serves no algorithm with its own start"
DECOUPLED = "optimizer needs weights that shrink by themselves, .* FedLESAM"
MEAN_LOSS = "MimeLite needs a loss that is a mean over samples"
REFUSED: dict[tuple[str, Any, str, Any], str] = {
    ("algorithm", "fedexp", "personal", True): OWN_START,
    ("algorithm", "fednsam", "personal", True): OWN_START,
    ("algorithm", "fedexp", "compression", True): "needs a server that reads only the deltas, but FedExP",
    ("algorithm", "fedexp", "schedule", "server"): "server_lr=.* needs a server's step with a learning rate",
    ("algorithm", "mimelite", "loss", "class weights"): MEAN_LOSS,
    ("algorithm", "mimelite", "loss", "sum"): MEAN_LOSS,
    ("model", "batch norm", "measure", "train"): "buffers='average' changes them",
    ("model", "batch norm", "measure", "consistency"): "buffers='average' changes them",
    ("loss", "dicts", "measure", "train"): "the measures train read the loss over pairs of tensors",
    ("algorithm", "fedlesam", "optimizer", "AdamW"): DECOUPLED,
    ("algorithm", "fedlesam", "optimizer", "AdamW with its rate"): DECOUPLED,
    ("algorithm", "fedlesam", "optimizer", "AdamW, kept"): DECOUPLED,
}


def refusal(features: Features) -> str | None:
    """Return the pattern of the message with which a combination is refused, or None."""
    for (name, value, other_name, other_value), pattern in REFUSED.items():
        if getattr(features, name) == value and getattr(features, other_name) == other_value:
            return pattern
    return None


def draws() -> list[Any]:
    """Return the seeds of all draws. A seed is slow if earlier ones have met each value of its features."""
    seeds, met = [], set[tuple[str, Any]]()
    for seed in range(ALL):
        values = set(vars(draw(seed)).items())
        seeds.append(pytest.param(seed, marks=pytest.mark.slow if values <= met else []))
        met |= values
    return seeds


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("seed", draws())
def test_features_together(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = draw(seed)
    print(features)
    if features.executor not in ON_GPU:
        monkeypatch.setattr(randomness, "device_generator", lambda device: None)
    compare(features, tmp_path)


def compare(features: Features, folder: Path) -> None:
    """Compare a run with the plain loop: weights, losses, traffic and numbers over clients."""
    pattern = refusal(features)
    if pattern is not None:
        with pytest.raises(ValueError, match=pattern):
            train(features, "sequential", folder)
        return
    try:
        result = train(features, features.executor, folder)
    except ValueError as error:
        if "cannot serve here" not in str(error):
            raise
        result = train(features, "sequential", folder)
    algorithm = algorithm_of(features)
    vectors = algorithm.download_vectors, algorithm.upload_vectors
    plain = Run(features, ACTIVE, slices_of(features), vectors)
    assert oracle.difference(result.model, plain.train()) < 1e-9
    for record, expected in zip(result.history, plain.history, strict=True):
        assert not record["excluded"]
        for key, value in expected.items():
            assert record[key] == pytest.approx(value, rel=1e-8, abs=1e-12), key


def slices_of(features: Features) -> list[Any]:
    """Return the indices of each client's test samples, a public fact of a run."""
    clients, test = data_of(features)
    slices = client_slices("iid", prepare(clients, test, DTYPE, torch.device("cpu")), 0)
    assert slices is not None and len(slices) == len(clients)
    return list(slices)
