"""A training pass before round 1: the tensors that it reads, and its side effects.

`trial.try_model` calls `try_pass` with a copy of the model and one batch. The checks of models and losses in training
are here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastsam.fed.common.fingerprints import references
from fastsam.fed.executors.gradient_passes import check_scalar
from fastsam.fed.executors.python_state import difference, python_state
from fastsam.fed.loop.effects import EffectRecorder, Effects, are_equal
from fastsam.fed.update.model_copy import trainable

log = logging.getLogger("fastsam.fed")
_GENERATORS = {"Python's random numbers", "numpy's random numbers"}  # keys of `python_state`
_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-10}  # relative, of the loss of a repeated pass


def try_pass(
    model: nn.Module,
    trial: nn.Module,
    loss: object,
    batch: Sequence[Tensor],
    compute: Callable[[], Tensor],
    failure: str,
) -> tuple[Effects, int]:
    """Take one training pass of `trial`, and repeat its forward half from the same weights, buffers and random state.

    Args:
        model: the user's model.
        trial: the copy that is tried. Afterwards its weights and buffers have the values after one pass.
        loss: the loss, whose references are searched for foreign parameters.
        batch: the tensors that the pass reads.
        compute: returns the loss of `trial` on the batch.
        failure: first words of the error if the model or the loss raises.

    Returns:
        The effects of the pass, and the number of bytes of its activations.

    Raises:
        ValueError: the pass raises, or one of the checks below fails.
    """
    _check_hooks(model)
    device, start = trainable(trial)[0].device, _copies(trial)
    versions = [t._version for t in batch if not t.is_inference()]
    copies, state = [t.clone() for t in batch], python_state(trial)
    with restore_random_state(device):
        recorder = EffectRecorder(trial, device)
        with explain(failure), recorder:
            value = compute()
        _check_loss(value)
        leaves = _leaves(value)
        _check_own_model(model, trial, leaves)
        with explain(failure):
            value.backward()
        effects = recorder.effects()
    _check_gradients(trainable(trial))
    changed_batch = versions != [t._version for t in batch if not t.is_inference()]
    if changed_batch or not all(map(are_equal, batch, copies)):
        raise ValueError(
            "a training pass writes into its batch, so that the data themselves would change. Return new tensors: "
            "torch.relu(x) in place of x.relu_(), inplace=False"
        )
    with explain(f"{failure} when it was repeated"):
        second_value, activations = _repeat(trial, batch, compute, start)
        if not _are_close(value, second_value):
            # Inside the recorder torch does not round the inner product of a bilinear layer to bfloat16. A model
            # without hidden state passes if each kind of pass, recorded and plain, agrees with its own repetition.
            plain_value, _ = _repeat(trial, batch, compute, start)
            with EffectRecorder(trial, device):
                recorded_value, _ = _repeat(trial, batch, compute, start)
            if _are_close(plain_value, second_value) and _are_close(recorded_value, value):
                value = second_value
    _check_repeated(value, second_value, difference(state, python_state(trial)))
    foreign = leaves.keys() & _leaves(second_value).keys() - {*map(id, trial.parameters()), *map(id, batch)}
    if foreign:
        leaf = leaves[min(foreign)]
        name = _name_of(leaf, loss) or f"a tensor of shape {list(leaf.shape)}"
        raise ValueError(
            f"the loss has a gradient for {name}, which is not a parameter of the model and would never be trained. "
            "Make it a part of the model, or set requires_grad=False"
        )
    return effects, activations


def try_again(trial: nn.Module, compute: Callable[[], Tensor]) -> Effects:
    """Return the effects of a training pass of `trial` on another batch.

    An error of the model or the loss shows nothing here: the run raises it for a client, or excludes the client.
    """
    device = trainable(trial)[0].device
    with restore_random_state(device):
        recorder = EffectRecorder(trial, device)
        try:
            with recorder:
                value = compute()
            value.backward()
        except Exception as error:
            log.debug("a trial of the smallest batch failed: %s", error)
        return recorder.effects()


def _copies(trial: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors that a pass may write: trained parameters and buffers."""
    tensors = [pair for pair in trial.named_parameters() if pair[1].requires_grad] + [*trial.named_buffers()]
    return {name: t.detach().clone() for name, t in tensors}


def _repeat(
    trial: nn.Module, batch: Sequence[Tensor], compute: Callable[[], Tensor], start: Mapping[str, Tensor]
) -> tuple[Tensor, int]:
    """Return the loss of a repeated forward pass, and the number of bytes that it keeps for a backward pass, without
    parameters and batch. The number is 0 if the model uses `torch.func.grad`, under which torch refuses hooks."""
    other = {t.untyped_storage().data_ptr() for t in (*trial.parameters(), *batch)}
    sizes = dict[int, int]()

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in other:
            sizes[storage.data_ptr()] = storage.nbytes()
        return t

    def run(context: AbstractContextManager[object]) -> Tensor:
        with torch.no_grad():
            for name, t in (*trial.named_parameters(), *trial.named_buffers()):
                if name in start:
                    t.copy_(start[name])
        with restore_random_state(trainable(trial)[0].device), context:
            return compute()

    try:
        return run(saved_tensors_hooks(keep, lambda t: t)), sum(sizes.values())
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        return run(nullcontext()), 0


@contextmanager
def explain(failure: str) -> Iterator[None]:
    """Raise ValueError, beginning with `failure`, for any exception inside."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{failure}: {type(error).__name__}: {error}") from error


def restore_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Restore torch's default generators at the end."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _leaves(value: Tensor) -> dict[int, Tensor]:
    """Return the leaves of the graph of `value` by their id."""
    leaves, visited_nodes, todo = dict[int, Tensor](), set[object](), [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in visited_nodes:
            continue
        visited_nodes.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        todo += [inner for inner, _ in node.next_functions]
    return leaves


def _check_hooks(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"the parameter {name!r} has hooks, and clients train on copies without them. Remove the hooks; a mask "
                "of gradients becomes a mask in forward(), or requires_grad=False, or a step of the algorithm"
            )


def _check_own_model(model: nn.Module, trial: nn.Module, leaves: Mapping[int, Tensor]) -> None:
    """Raise ValueError if the loss refers to the user's model. (A scripted copy has no leaves, see
    `_check_gradients`.)"""
    if leaves.keys().isdisjoint(map(id, trial.parameters())):
        return
    name = next((name for name, p in model.named_parameters() if id(p) in leaves), None)
    if name is not None:
        raise ValueError(
            f"the loss refers to your model's parameter {name!r}, but clients train on copies: the term would train "
            "nothing. Use loss=fed.BatchLoss(f): f(model, batch) gets the copy"
        )


def _check_loss(value: object) -> None:
    if not check_scalar(value).requires_grad:
        if not torch.is_grad_enabled():
            raise ValueError(
                "gradients are switched off around the call (torch.no_grad, torch.inference_mode?); call outside of it"
            )
        raise ValueError("the loss does not depend on the model's trainable parameters (it has no gradient)")


def _check_gradients(parameters: Sequence[nn.Parameter]) -> None:
    # The parameters of a scripted model's copy are not leaves, and reading their gradients would warn.
    gradients = [p.grad for p in parameters if p.is_leaf]
    if all(g is None for g in gradients):
        raise ValueError(
            "no trainable parameter of the model gets a gradient (a torch.jit.script model?); hand over the module "
            "that it was made of"
        )
    if any(g is not None and g.is_sparse for g in gradients):
        raise ValueError(
            "the model has sparse gradients (Embedding(sparse=True)?), which the kernels do not read; use dense ones"
        )


def _are_close(first: Tensor, second: Tensor) -> bool:
    """Return True if two losses differ by rounding only, or are both NaN."""
    a, b = first.item(), second.item()
    return math.isclose(a, b, rel_tol=_ROUNDING.get(first.dtype, 1e-5)) or (math.isnan(a) and math.isnan(b))


def _check_repeated(first: Tensor, second: Tensor, cause: str | None) -> None:
    """Raise ValueError if a pass depends on more than weights, buffers, batch and torch's generators. `cause`
    names the Python state that differs after its repetition."""
    generators = [name for name in _GENERATORS if name in (cause or "")]
    if _are_close(first, second) and not generators:
        return
    a, b = first.item(), second.item()
    raise ValueError(
        f"a training pass, repeated from the same weights, batch and seed, gives the loss {b:.9g} after {a:.9g}, and "
        f"it changes {cause or 'something that is not in the model'}. Results must depend only on weights, buffers "
        "and batch: draw random numbers with torch, and keep counters in buffers (register_buffer) that forward() "
        "writes in place"
    )


def _name_of(leaf: Tensor, loss: object) -> str | None:
    """Return the name of `leaf` among the things that `loss` refers to."""
    for name, value in references(loss).items():
        if value is leaf:
            return repr(name)
        for inner, p in value.named_parameters() if isinstance(value, nn.Module) else ():
            if p is leaf:
                return repr(f"{name}.{inner}")
    return None
