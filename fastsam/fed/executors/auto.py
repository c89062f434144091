"""The choice of an executor: the named one, or one by a rule on model, shapes and device.

The rule never measures anything at run time, because a timed choice would change the bits from run to run. Its numbers
are in docs/about_speed.md and docs/about_gpu.md. `_not_stacked` asks if stacked clients are the fastest, and
`stacked.why_not` if they are possible at all: with the run's options (`base.refusal`), with the model, and in a trial
of two rows.

On a GPU the first row that fits decides. The times were measured on an H200.

    clients                                                          takes    decided by
    dense models, with a row program or at most 2^20 parameters      vmap     .28 of graph's time or less
    loops of an algorithm                                            streams  predicted
    steps that can be captured; a sort's first steps are eager       graph    for CNNs vmap takes .8 to 1.1 of its time,
                                                                              and has other bits
    the same with dropout, batches read one by one, or clients that  graph    .03 of sequential's time
    may raise
    other steps: hooks, values on the host, Python state             streams  predicted; several processes took longer
                                                                              than one
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastsam.fed.executors import graph, stacked, streams, threads
from fastsam.fed.executors.base import Executor, registry
from fastsam.fed.executors.task import Setup

log = logging.getLogger("fastsam.fed")

AUTO = "auto"
# Parameters: wider dense models keep a core busy by themselves, and stacked rows leave the cache; row programs go row
# by row. On an H200 an MLP of 77,000 parameters takes .28 of graph's time; larger ones were not measured.
_MAX_NUMEL = {"cpu": 2**16, "cuda": 2**20}
_MAX_NUMEL_ROWWISE = 2**20
# Frozen parameters have no rows in the cache, but cost as much in a forward pass. All parameters together may be
# `_FROZEN` times the limit: transformers with LoRA were measured on a CPU, 2^19; GPUs are predicted.
_FROZEN = 8


# Executors that a plain PyTorch loop equals on an H200. Remedies by a part of the reason.
_ONE_BY_ONE = ("streams", "sequential")
_REMEDIES = {
    "in a loop of its own": "Algorithms without `train_client` are stacked or captured",
    "hooks": "Remove the hooks of the model",
    "values on the host": "Keep values on the device: no .item(), no `if` on a tensor. With a model of Hugging Face, "
    "pass the attention mask as numbers (0 and finfo.min), or take another attn_implementation ('sdpa', 'eager')",
    "on the CPU": "Draw random numbers on the device of the inputs (device=x.device)",
    "Python's state": "Keep state in buffers, not in attributes of the model",
    "torch.vmap cannot map": "With a model of Hugging Face, take another attn_implementation ('sdpa', 'eager') or "
    "another precision",
    "does not serve the options": "Leave out these options",
}


@dataclass(frozen=True)
class Choice:
    """An executor, the name that it was chosen by, why it is this one, and a warning if it is slow ("" if not)."""

    executor: Executor
    name: str
    reason: str
    warning: str = ""

    def record(self) -> dict[str, Any]:
        """Return the choice for the run directory."""
        executor = self.executor
        return {"name": self.name, "slots": executor.slots, "reason": self.reason, "numbers": executor.numbers}


def choose(name: str, setup: Setup) -> Choice:
    """Return the executor `name`, or the rule's for "auto". Raises ValueError, with the reason, if the named one cannot
    serve."""
    reason, warning = "it was asked for", ""
    if name == AUTO:
        name, reason = rule(setup)
        warning = warning_of(setup, name, reason)
    executor = registry[name](setup)
    log.info("executor %r, %d slots: %s", name, executor.slots, reason)
    return Choice(executor, name, reason, warning)


def warning_of(setup: Setup, name: str, reason: str) -> str:
    """Return the warning about an executor that "auto" takes on a GPU for want of a faster one, or ""."""
    if setup.device.type != "cuda" or name not in _ONE_BY_ONE:
        return ""
    remedies = [remedy for part, remedy in _REMEDIES.items() if part in reason]
    return (
        f"executor 'auto' takes {name!r} on a GPU, where a round takes as long as in a plain PyTorch loop: {reason}. "
        f"{'. '.join(remedies) or 'See docs/executors.md for what can be stacked or captured'}"
    )


def rule(setup: Setup) -> tuple[str, str]:
    """Return the executor's name, and why."""
    reason = _not_stacked(setup)
    if reason is None:
        return "vmap", "stacked clients of such a model share the cost of every call"
    if setup.device.type == "cuda" and streams.why_not(setup) is None:
        if setup.loop:
            return "streams", f"one stream per client, because {reason}"
        capture_problem = _not_captured(setup)
        if capture_problem is None:
            return "graph", f"captured steps, a lane for each of several clients, because {reason}"
        return "streams", f"one stream per client, because {reason}; and steps are not captured: {capture_problem}"
    if setup.device.type == "cpu" and threads.why_not(setup) is None and (setup.options.slots or threads.cpus()) > 1:
        return "threads", f"one client per CPU, because {reason}"
    return "sequential", f"clients one after the other, because {reason}"


def _not_stacked(setup: Setup) -> str | None:
    """Return the reason why stacked clients (the executor "vmap") would be slower, or are impossible. None means that
    they are the fastest."""
    slots = setup.options.slots or stacked.slots_of(setup)
    reason = _not_dense(setup)
    if reason is not None:
        return reason
    limit = _MAX_NUMEL.get(setup.device.type, _MAX_NUMEL["cuda"])
    limit_rowwise = max(limit, _MAX_NUMEL_ROWWISE)
    numel = setup.layout.numel + setup.frozen_numel
    if setup.frozen_numel and numel > _FROZEN * limit:
        return (
            f"the model has {numel} parameters, {setup.frozen_numel} of them frozen, and stacked clients are faster "
            f"with at most {_FROZEN * limit}"
        )
    if setup.layout.numel > limit_rowwise:
        return f"the model has more than {limit_rowwise} parameters: one client keeps a processor busy"
    if slots == 1:
        return "clients train one at a time: there is nothing to stack"
    if _has_hooks(setup.model):
        return "the model has hooks: stacked clients would call them only while a pass is recorded"
    reason = stacked.why_not(setup)
    if reason is None and setup.layout.numel > limit and not stacked.has_row_program(setup):
        return f"the model has more than {limit} parameters and no row program: stacked rows leave the cache"
    return reason


def _not_dense(setup: Setup) -> str | None:
    """Return the reason why layers of the model would be slower stacked, or gain too little for other bits, or None."""
    modules = list(setup.model.modules())
    if any(isinstance(m, nn.RNNBase) for m in modules):
        return "the model is not dense (recurrent layers): stacked, they are slower than one by one"
    has_convolutions = any(isinstance(m, nn.modules.conv._ConvNd) for m in modules)
    if not has_convolutions and all(len(s.shape) <= 2 for s in setup.layout.segments):
        return None
    return "the model is not dense (convolutions): stacked, they are slower or gain little"


def _not_captured(setup: Setup) -> str | None:
    """Return the reason why a captured step is impossible, or would hide something, or None."""
    if _has_hooks(setup.model):
        return "the model has hooks, which would be called only at the capture"
    return graph.Graph.why_not(setup)


def _has_hooks(model: nn.Module) -> bool:
    """Return True if the model has hooks. torch has no public name for a module's hooks."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(m, kind, None) for m in model.modules() for kind in kinds)
