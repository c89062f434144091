"""The same cases under pytest-benchmark, for tools that compare runs:
`pytest bench/ --benchmark-only --benchmark-json=FILE`.

Handing over the gradients is not on the clock here either. Interleaving is beyond pytest-benchmark: it measures one
case after the other, so `python -m bench.step` is the better judge of who is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench import gate
from bench.cases import Case, cases
from bench.problem import Gradients, initial_weights
from bench.report import threads_of
from bench.timing import Clock, Drive

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed: pip install 'fused-sam[bench]'")

CLOCK = Clock()
THREADS = (1, 2)


@pytest.fixture(params=THREADS, ids=lambda n: f"threads{n}")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
@pytest.mark.benchmark(timer=CLOCK, disable_gc=True)
def test_step(case: Case, threads: int, benchmark: Any) -> None:
    reason = case.contender.why_not()
    if reason is not None:
        pytest.skip(reason)
    weights, gradients = initial_weights(case.size.shapes), Gradients(case.size.shapes)
    green, red = gate.check([case.contender], weights, gradients)
    assert not red, f"wrong, so not measured: {red[case.contender.name]}"
    benchmark.group = f"{case.size.name}, {threads_of(threads)}"
    benchmark.extra_info |= {"tensors": len(case.size.shapes), "parameters": case.size.parameters, "threads": threads}
    drive = Drive(green[case.contender.name], gradients, CLOCK)
    benchmark.pedantic(drive.step, rounds=case.size.rounds, iterations=case.size.steps, warmup_rounds=1)
