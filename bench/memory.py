"""The memory that a contender needs beyond the weights and the gradients: counted, not estimated."""

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.contenders import Contender
from bench.timing import no_garbage_collection
from bench.workload import Gradients

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces its start and stop on stderr otherwise


def peak_extra_bytes(contender: Contender, weights: Sequence[Tensor], gradients: Gradients) -> int:
    """Return the peak bytes on torch's allocator while the contender is built and takes two steps, less its copy of the
    weights.

    They are its state (momentum included) and its largest temporaries. Allocations of other libraries are not seen; the
    kernels here make none of the parameters' size. On the CPU torch's profiler counts, on CUDA the allocator itself.
    """

    def two_steps() -> None:
        stepper, passes = contender.build(weights), 0
        for _ in range(2):
            for phase in stepper.phases():
                stepper.set_grads(gradients, passes)
                passes += 1
                phase()

    gradients.flat(0)  # made before the count begins
    with no_garbage_collection():
        peak = (_peak_cuda if weights[0].is_cuda else _peak_cpu)(two_steps)
    return peak - sum(w.numel() * w.element_size() for w in weights)


def _peak_cpu(body: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        body()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        raise RuntimeError("torch's profiler gave no results, so memory cannot be counted; use a torch with Kineto")
    current = peak = 0
    for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def _peak_cuda(body: Callable[[], None]) -> int:
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    body()
    return torch.cuda.max_memory_allocated() - start
