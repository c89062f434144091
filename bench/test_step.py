"""The cases of `python -m bench step` under pytest-benchmark, for tools that compare runs:
`pytest bench/ --benchmark-only --benchmark-json=FILE`.

Handing over the gradients is not on the clock here either. pytest-benchmark cannot interleave: it measures one case
after the other, so `python -m bench step` compares contenders better.
"""

import itertools
import time
from typing import Any

import pytest

from bench import correctness
from bench.contenders import Contender, contenders
from bench.timing import intra_op_threads
from bench.workload import SIZES, Gradients, Size, initial_weights

hidden = 0.0  # seconds that are not on the clock


@pytest.mark.parametrize("threads", [1, 2], ids=lambda n: f"threads{n}")
@pytest.mark.parametrize("contender", contenders().values(), ids=lambda contender: contender.name)
@pytest.mark.parametrize("size", SIZES.values(), ids=lambda size: size.name)
@pytest.mark.benchmark(timer=lambda: time.perf_counter() - hidden, disable_gc=True)
def test_step(size: Size, contender: Contender, threads: int, benchmark: Any) -> None:
    if contender.absent:
        pytest.skip(contender.absent)
    gradients, passes = Gradients(size.shapes), itertools.count()
    with intra_op_threads(threads):
        steppers, problems = correctness.check([contender], initial_weights(size.shapes), gradients)
        assert not problems, f"wrong, so not measured: {problems[contender.name]}"

        def step() -> None:
            global hidden
            for phase in steppers[contender.name].phases():
                start = time.perf_counter()
                steppers[contender.name].set_grads(gradients, next(passes))
                hidden += time.perf_counter() - start
                phase()

        benchmark.extra_info |= size.facts | {"threads": threads}
        benchmark.pedantic(step, rounds=size.rounds, iterations=size.steps, warmup_rounds=1)
