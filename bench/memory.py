"""How much memory a contender needs beyond the weights and the gradients: counted, not estimated."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.contenders import Contender
from bench.problem import Gradients
from bench.timing import no_garbage_collection

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces its start and stop on stderr otherwise


def peak_extra_bytes(contender: Contender, weights: Sequence[Tensor], gradients: Gradients) -> int:
    """Peak bytes on torch's CPU allocator while the contender is built and takes two steps, less its copy of the
    weights.

    That is its state (momentum included) and its largest temporaries. Allocations of other libraries are not seen; the
    kernels here make none of the parameters' size.
    """
    gradients.flat(0)  # made before the count begins
    with no_garbage_collection(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _two_steps(contender, weights, gradients)
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        raise RuntimeError(
            "torch's profiler gave no results, so memory cannot be counted; run with a torch built with Kineto"
        )
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda event: event.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    return peak - sum(w.numel() * w.element_size() for w in weights)


def peak_extra_bytes_cuda(contender: Contender, weights: Sequence[Tensor], gradients: Gradients) -> int:
    """The same on CUDA, by the statistics of torch's allocator there."""
    gradients.flat(0)
    with no_garbage_collection():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _two_steps(contender, weights, gradients)
    return torch.cuda.max_memory_allocated() - before - sum(w.numel() * w.element_size() for w in weights)


def _two_steps(contender: Contender, weights: Sequence[Tensor], gradients: Gradients) -> None:
    stepper = contender.build(weights)
    for step in range(2):
        stepper.take(gradients, 2 * step)
        stepper.first()
        stepper.take(gradients, 2 * step + 1)
        stepper.second()
