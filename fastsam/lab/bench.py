"""Times on this machine for `fastsam bench`: whole steps of SAM next to the class that projects copy, and federated
rounds next to a plain loop with that class.

Both contenders of a table take turns, so that a disturbance reaches both, and a time is the median of its turns.
"""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fastsam import FusedSAM, backends, fed
from fastsam.extras import DISTRIBUTION, installed_version
from fastsam.fed.models import build
from fastsam.lab.copied_class import CopiedSAM

Samples = tuple[Tensor, Tensor]

RHO, LR, BATCH, CLASSES = 0.05, 0.1, 16, 10
CLIENTS, COHORT, FEWEST, MOST = 100, 20, 8, 120  # clients in all and in a round; samples of a client
SECONDS = 15.0  # time of a row of a table, about
SAMPLE = 0.1  # seconds of a turn of steps
WARM_ROUNDS, ROUNDS = 3, (5, 60)  # rounds that do not count; fewest and most that do
MODELS = {
    "MLP": ("mlp", (64,), {"hidden": 32}),
    "CNN": ("cnn", (1, 28, 28), {}),
    "ResNet-18": ("resnet18_gn", (3, 32, 32), {}),
}
OF_ROUNDS = ("MLP", "CNN")


def device_of(name: str | None) -> torch.device:
    """Return the device to measure; None is the GPU if torch sees one.

    Raises ValueError if a GPU is requested and missing.
    """
    if name != "cpu" and torch.cuda.is_available():
        return torch.device("cuda")
    if name == "cuda" and torch.version.cuda is None:
        raise ValueError(
            f"torch {torch.__version__} is built without CUDA, so it sees no GPU; https://pytorch.org/get-started has "
            "a build with it. `--device cpu` measures the CPU"
        )
    if name == "cuda":
        raise ValueError(
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and sees no GPU. `nvidia-smi` says "
            "whether there is one and which driver it has. `--device cpu` measures the CPU"
        )
    return torch.device("cpu")


def make_model(name: str, device: torch.device) -> nn.Module:
    """Return a model of `MODELS`, always with the same weights."""
    kind, shape, options = MODELS[name]
    return build(kind, shape, CLASSES, seed=0, **options).to(device)


# --- steps ---


def step_of(name: str, make: Callable[[nn.Module], FusedSAM | CopiedSAM], device: torch.device) -> Callable[[], Tensor]:
    """Return a function that takes one whole step of SAM on a batch, and returns the loss of the first pass."""
    model, rng = make_model(name, device), torch.Generator().manual_seed(0)
    x, y = torch.randn(BATCH, *MODELS[name][1], generator=rng).to(device), torch.arange(BATCH, device=device) % CLASSES
    optimizer = make(model)

    def step() -> Tensor:
        return take_step(model, optimizer, x, y)

    return step


def take_step(model: nn.Module, optimizer: FusedSAM | CopiedSAM, x: Tensor, y: Tensor) -> Tensor:
    """Take a step with two passes, and return the loss of the first one."""
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.first_step()
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.second_step()
    optimizer.zero_grad()
    return loss.detach()


def copied(model: nn.Module) -> CopiedSAM:
    """Return the class that projects copy."""
    return CopiedSAM(model.parameters(), torch.optim.SGD, rho=RHO, lr=LR)


def fused(model: nn.Module) -> FusedSAM:
    """Return fastsam's optimizer."""
    return FusedSAM(model.parameters(), torch.optim.SGD, rho=RHO, lr=LR)


def time_steps(name: str, device: torch.device, seconds: float) -> tuple[float, float]:
    """Return the seconds of a step of the copied class and of `FusedSAM`. Raises RuntimeError if their losses after two
    steps differ, because then one of them computes something else."""
    steps = [step_of(name, make, device) for make in (copied, fused)]
    losses = [[float(step()) for _ in range(3)][-1] for step in steps]
    if not abs(losses[0] - losses[1]) <= 1e-3 * abs(losses[0]):
        raise RuntimeError(
            f"{name}: the copied class has the loss {losses[0]:.6g} after two steps, fastsam {losses[1]:.6g}"
        )
    count = max(1, round(SAMPLE / max(time_of(steps[0], device), 1e-9)))
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while not times[1] or time.perf_counter() < end:
        for step, taken in zip(steps, times, strict=True):
            taken.append(time_of(partial(_repeat, step, count), device) / count)
    return statistics.median(times[0]), statistics.median(times[1])


def _repeat(step: Callable[[], object], count: int) -> None:
    for _ in range(count):
        step()


def time_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `work` takes, on a GPU until it is done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else int
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


# --- rounds ---


def clients_of(name: str, device: torch.device) -> list[Samples]:
    """Return clients of unequal sizes: noise around a prototype per class."""
    rng, shape = torch.Generator().manual_seed(0), MODELS[name][1]
    prototypes, clients = torch.randn(CLASSES, *shape, generator=rng), []
    for size in torch.randint(FEWEST, MOST + 1, (CLIENTS,), generator=rng).tolist():
        y = torch.randint(CLASSES, (size,), generator=rng)
        x = 0.5 * prototypes[y] + torch.randn(size, *shape, generator=rng)
        clients.append((x.to(device), y.to(device)))
    return clients


def plain_round(model: nn.Module, clients: Sequence[Samples], lr: float = LR) -> None:
    """Train `model` for a round of FedSAM on these clients, one epoch each, as one writes it without a library."""
    start = [p.detach().clone() for p in model.parameters()]
    mean = [torch.zeros_like(p) for p in start]
    for x, y in clients:
        with torch.no_grad():
            for p, value in zip(model.parameters(), start, strict=True):
                p.copy_(value)
        optimizer, order = CopiedSAM(model.parameters(), torch.optim.SGD, rho=RHO, lr=lr), torch.randperm(len(y))
        for places in order.to(y.device).split(BATCH):
            take_step(model, optimizer, x[places], y[places])
        for total, p in zip(mean, model.parameters(), strict=True):
            total.add_(p.detach(), alpha=1 / len(clients))
    with torch.no_grad():
        for p, value in zip(model.parameters(), mean, strict=True):
            p.copy_(value)


def time_rounds(name: str, device: torch.device, seconds: float) -> tuple[float, float]:
    """Return the seconds of a round of a plain loop and of `fed.run`, one after the other."""
    clients, model = clients_of(name, device), make_model(name, device)
    rng = torch.Generator().manual_seed(0)

    def loop() -> None:
        plain_round(model, [clients[i] for i in torch.randperm(CLIENTS, generator=rng)[:COHORT].tolist()])

    loop()
    count = WARM_ROUNDS + min(max(round(seconds / time_of(loop, device)), ROUNDS[0]), ROUNDS[1])
    plain_times, times, since = list[float](), list[float](), [0.0]

    def tick(record: object) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - since[0])
        plain_times.append(time_of(loop, device))
        since[0] = time.perf_counter()

    fed.run(
        make_model(name, device), clients, fed.FedSAM(rho=RHO), rounds=count, cohort=COHORT, lr=LR, batch_size=BATCH,
        test=clients[0], eval_every=count, progress=tick,
    )  # fmt: skip
    times, plain_times = times[WARM_ROUNDS:-1], plain_times[WARM_ROUNDS:-1]  # the last round evaluates
    return statistics.median(plain_times), statistics.median(times)


# --- what is printed ---


def machine(device: torch.device) -> str:
    """Return the name of the processor or GPU, with the number of threads or the GPU's memory."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"
    path = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.*)", path.read_text(), re.M) if path.exists() else None
    name = match[1] if match else platform.processor() or platform.machine()
    return f"{name}, threads: {torch.get_num_threads()}"


def lines(device: torch.device) -> list[str]:
    """Measure, print two tables line by line, and return the lines. The last one is for an issue."""
    shown: list[str] = []

    def show(line: str) -> None:
        print(line, flush=True)
        shown.append(line)

    versions = f"fastsam {installed_version(DISTRIBUTION)}, torch {torch.__version__}"
    facts = [f"{machine(device)}; {versions}, backend {backends.backend(device.type)}"]
    show(facts[0])
    for title, details, unit, names, measure in (
        ("step of SAM", f"batch of {BATCH}", "copied class", tuple(MODELS), time_steps),
        ("round of FedSAM", f"{COHORT} clients", "plain loop", OF_ROUNDS, time_rounds),
    ):
        show(f"\n{f'a {title}, {details}':<32}{unit:>14}{'fastsam':>12}{'ratio':>8}")
        for name in names:
            theirs, ours = measure(name, device, SECONDS)
            show(f"  {name:<30}{_ms(theirs):>14}{_ms(ours):>12}{ours / theirs:>8.2f}")
            facts.append(f"{title}, {name}: {_ms(theirs)}, {_ms(ours)}")
    show(f"\nfor an issue: {'; '.join(facts)}")
    return shown


def _ms(seconds: float) -> str:
    """Return milliseconds with three digits."""
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:#.3g} ms"
