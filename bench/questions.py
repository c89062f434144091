"""The questions that `python -m bench` answers, each with its cases in the order in which they are measured."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from bench import evidence, language, ncu, ops, steps, whole_steps
from bench.case import Case, Options
from bench.contenders import Contender, contenders, variant_contenders
from bench.fed import cases as federated
from bench.kernel_cases import CPU_LEFT_OUT, OPS, kernel_cases
from bench.workload import KERNEL_SIZES, SIZES
from fastsam import backends

KERNEL_ROUNDS, FEW_ROUNDS = 21, 5
CASE_SECONDS = {"cpu": 4.0, "cuda": 1.5}  # time limit of a case's rounds
TO = ("copied", "flat", "foreach", "compiled")
STEPS_LAST = {"30m": 1, "100m": 2}  # large sizes, in this order: torch.compile takes longest on the last
COMPILED_SIZES = ("resnet18", "100m", "50k", "225k")  # each takes most of a minute to compile
WHOLE = ("fastsam_native", "fastsam_foreach", "pytorch_optimizer_foreach", "pytorch_optimizer", "copied")
COPIED_TENSORS = 400  # number of tensors from which on the copied class, ten launches per tensor and step, is left out
LAUNCHES_LEFT_OUT = ("225k", "30m", "cut10", "cut100", "cut400")  # a profile takes a while; the others tell enough
Contenders = Mapping[str, Contender]
VARIANT_SIZES = {"cpu": [SIZES[n] for n in ("resnet18", "small_cnn")],
                 "cuda": [KERNEL_SIZES[n] for n in ("50k", "resnet18", "100m")]}  # fmt: skip


def _steps(
    options: Options, part: str, name: str, table: Contenders, *arguments: Any, **keywords: Any
) -> Iterator[Case]:
    """Yield a case of steps, if `--rows` leaves contenders."""
    subset = [table[one] for one in options.select(table) if not (options.quick and table[one].compiles)]
    if subset:
        yield Case(part, name, [one.name for one in subset], partial(steps.measure, subset, *arguments, **keywords))


def step(options: Options) -> Iterator[Case]:
    """Yield the optimizer part of a SAM step by one and two threads, and whole steps, of all contenders."""
    for size, threads in itertools.product(SIZES.values(), (1, 2)):
        arguments = (size, options.machine, options.number(size.rounds))
        keywords = {"steps": size.steps, "threads": threads, "references": TO}
        yield from _steps(options, "step", f"{size.name}-{threads}", contenders(options.device), *arguments, **keywords)
    table = {name: one for name, one in contenders(options.device).items() if name in WHOLE}
    if subset := [table[name] for name in options.select(table)]:
        for name, training in whole_steps.TRAININGS.items():
            run = partial(whole_steps.measure, subset, training, options.machine, options.number(31))
            yield Case("whole", name, [one.name for one in subset], run)


def kernels(options: Options) -> Iterator[Case]:
    """Yield every op and whole steps against the memory floor, eager and replayed."""
    limits = (options.number(KERNEL_ROUNDS, FEW_ROUNDS), CASE_SECONDS[options.device])
    sizes = [s for s in KERNEL_SIZES.values() if options.device == "cuda" or s.name not in CPU_LEFT_OUT]
    for size in sorted(sizes, key=lambda s: STEPS_LAST.get(s.name, 0)):
        left_out = {"flat", "pytorch_optimizer", "pytorch_optimizer_foreach"}
        left_out |= {"compiled"} if size.name not in COMPILED_SIZES else set()
        left_out |= {"copied"} if len(size.shapes) >= COPIED_TENSORS else set()
        table = {name: c for name, c in contenders(options.device).items() if name not in left_out}
        counts = ("memory", "replays", *(("launches",) if size.name not in LAUNCHES_LEFT_OUT else ()))
        arguments = (size, options.machine, *limits)
        if size.rows == 1:
            yield from _steps(options, "steps", size.name, table, *arguments, rotate=True, references=TO, counts=counts)
    names = options.select(b.name for b in backends.table() if b.device == options.device)
    for case in kernel_cases(sizes, list(OPS.values())) if names else ():
        yield Case("ops", case.name, names, partial(ops.measure, case, options.machine, *limits, names))


def family(options: Options) -> Iterator[Case]:
    """Yield the optimizer part of a step of every variant of SAM, and of pytorch-optimizer's classes."""
    table = variant_contenders(peers=options.device == "cpu")
    for size in VARIANT_SIZES[options.device]:
        num_steps = max(size.steps // steps.INTERVAL * steps.INTERVAL, steps.INTERVAL)
        arguments = (size, options.machine, options.number(15))
        yield from _steps(
            options, "variants", size.name, table, *arguments, steps=num_steps, references=("SAM",), counts=("calls",)
        )


def profile(options: Options) -> Iterator[Case]:
    """Yield Nsight Compute's figures of norm, perturbation, update and a row program."""
    yield Case("ncu", "Nsight Compute", (), lambda: {"rows": ncu.measure()})


QUESTIONS: dict[str, Callable[[Options], Iterator[Case]]] = {
    "step": step, "variants": family, "kernels": kernels,
    "evidence": evidence.cases, "language": language.cases, "federated": federated.all_of, "ncu": profile,
}  # fmt: skip
