"""Operations that are repeated: memory, tensors and open files must not grow with the number of repetitions."""

import gc
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from fastsam import FusedSAM, backends, fed
from tests.attack.trials import Attack, Trial
from tests.helpers import oracle
from tests.helpers.fed_rundir import start
from tests.helpers.sam_oracle import backward, make_parameters

WARM, TIMES = 12, 30  # repetitions of a whole run; a step is repeated a hundred times as often
STEPS = 100
OBJECTS, KILOBYTES = 400, 4096  # allowed growth, for caches that fill and for the allocator
Work = Callable[[Path], None]


def _run(executor: str) -> Work:
    def work(folder: Path) -> None:
        clients = oracle.ragged_clients(torch.float32)
        model = oracle.smooth_model(torch.float32)
        fed.run(model, clients, fed.SCAFFOLD(), rounds=2, participation=0.8, executor=executor, test=clients[0])

    return work


def _run_in_a_directory(folder: Path) -> None:
    for rounds in (1, 2):
        start(folder / "run", algorithm=fed.FedDyn(), rounds=rounds, resume=True, executor="sequential")
    shutil.rmtree(folder / "run")


def _steps(backend: str) -> Work:
    params = make_parameters([(50, 30), (40,)], torch.bfloat16)
    opt = FusedSAM(params, torch.optim.AdamW, lr=1e-4, backend=backend)

    def work(folder: Path) -> None:
        for step in range(STEPS):
            opt.step(lambda step=step: backward(params, step))  # type: ignore[misc]

    return work


def _optimizers(folder: Path) -> None:
    """Make an optimizer, save its state, and load the state into a second optimizer."""
    opts = []
    for _ in range(2):
        params = make_parameters([(50, 30), (40,)], torch.float32)
        opt = FusedSAM(params, torch.optim.SGD, lr=0.1, momentum=0.9)
        opt.step(lambda params=params: backward(params, 0))  # type: ignore[misc]
        opts.append(opt)
    file = io.BytesIO()
    torch.save(opts[0].state_dict(), file)
    file.seek(0)
    opts[1].load_state_dict(torch.load(file, weights_only=True))


def _refuse_runs(folder: Path) -> None:
    """Start a run that is refused before its first round, and a run that fails in its first round."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if output.requires_grad and output.shape[0] == 1:
            raise ValueError("mine")
        return torch.nn.functional.cross_entropy(output, target)

    clients = oracle.ragged_clients(torch.float32)
    for options in ({"lr": -1.0}, {"loss": loss, "run_dir": folder / "run", "executor": "sequential"}):
        try:
            fed.run(oracle.smooth_model(torch.float32), clients, fed.FedAvg(), rounds=1, participation=1.0, **options)
        except (ValueError, fed.ClientError):
            continue
        raise AssertionError(f"{options} was taken")
    shutil.rmtree(folder / "run", ignore_errors=True)


BACKENDS = [b.name for b in backends.table() if b.device == "cpu" and b.available and b.name != "triton"]
EXECUTORS = ("sequential", "threads", "vmap")
SUBJECTS: dict[str, Callable[[], Work]] = {
    **{f"steps on {name}": (lambda name=name: _steps(name)) for name in BACKENDS},  # type: ignore[misc]
    **{f"runs on {name}": (lambda name=name: _run(name)) for name in EXECUTORS},  # type: ignore[misc]
    "runs in a directory": lambda: _run_in_a_directory,
    "optimizers": lambda: _optimizers,
    "runs that are refused": lambda: _refuse_runs,
}


def _measure_resources() -> dict[str, int]:
    gc.collect()
    objects = gc.get_objects()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    tensors = sum(isinstance(entry, torch.Tensor) for entry in objects)
    return {
        "tensors": tensors, "objects": len(objects), "files": len(os.listdir("/proc/self/fd")), "kilobytes": resident,
    }  # fmt: skip


def repeat_subject(trial: Trial) -> int:
    """Compare the resources of one subject after `WARM` repetitions with its resources after `TIMES` more."""
    name = sorted(SUBJECTS)[trial.number % len(SUBJECTS)]
    work = SUBJECTS[name]()
    for _ in range(WARM):
        work(trial.folder)
    old_resources = _measure_resources()
    for _ in range(TIMES):
        work(trial.folder)
    new_resources = _measure_resources()
    growth = {key: new_resources[key] - old_resources[key] for key in new_resources}
    limits = {"tensors": 0, "objects": OBJECTS, "files": 0, "kilobytes": KILOBYTES}
    print(name, growth, flush=True)
    assert all(growth[key] <= limits[key] for key in growth), f"{name}, {TIMES} times: more of {growth}"
    return TIMES


ATTACKS = (Attack("leaks", "runs and steps that are repeated keep no memory, tensors or files", repeat_subject),)
