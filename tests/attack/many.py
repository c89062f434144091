"""A hundred thousand clients: started, and a round, in seconds and with memory that follows the data."""

import resource
import time

import torch
from torch import nn

from fastsam import fed
from tests.attack.trials import Attack, Trial

CLIENTS, SAMPLES, FEATURES = 100_000, 2, 8
SECONDS = 60.0  # a start took two minutes once; the machine may be busy
MEGABYTES = 1000  # beyond what torch itself takes; the clients' own tensors take some 200
ALGORITHMS = (fed.FedAvg(), fed.SCAFFOLD(), fed.FedDyn(), fed.FedLESAM(rho=0.1))


def train_many(trial: Trial) -> int:
    """Start and one round with a hundred of them, by several algorithms in turn."""
    generator = torch.Generator().manual_seed(trial.number)
    x = torch.randn(CLIENTS, SAMPLES, FEATURES, generator=generator)
    y = torch.randint(0, 3, (CLIENTS, SAMPLES), generator=generator)
    clients = list(zip(x.unbind(), y.unbind(), strict=True))
    old_megabytes, start = _peak_megabytes(), time.monotonic()
    algorithm = ALGORITHMS[trial.number % len(ALGORITHMS)]
    result = fed.run(
        nn.Linear(FEATURES, 3), clients, algorithm, rounds=1, participation=1e-3, run_dir=trial.folder / "run"
    )
    seconds, growth = time.monotonic() - start, _peak_megabytes() - old_megabytes
    print(type(algorithm).__name__, seconds, growth, flush=True)
    assert len(result.history) == 1
    assert seconds < SECONDS, f"{algorithm}: {seconds:.0f} s"
    assert growth < MEGABYTES, f"{algorithm}: {growth:.0f} MB more"
    return 1


def _peak_megabytes() -> float:
    """Return the peak of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


ATTACKS = (
    Attack(
        "many-clients",
        "100,000 clients are ready and trained a round within a minute and a gigabyte",
        train_many,
        share=0.5,
        patience=300.0,
    ),
)
