"""`torch.ops.fastsam.*` called past `fastsam.ops`: every misuse is an error before anything is written, not a signal
and not a wrong number."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastsam_kernels import native
from tests.helpers.misuses import change_at, entry, free_storage, other_dtype, shorten_storage, spread
from tests.helpers.native_step import Step, calls, digest_of

pytestmark = pytest.mark.skipif(
    native.why_not("cpu") is not None, reason=f"no compiled kernels: {native.why_not('cpu')}"
)
Misuse = tuple[str, Callable[[Any], Any]]
FAR = 2**63 - 1
END = 97  # end of the last segment of `small_step`
MATRIX = 1  # the second operand of `shapes` below is one
LISTS: list[Misuse] = [
    ("empty", lambda ts: []), ("too few", lambda ts: ts[:2]),
    ("in another order", change_at(MATRIX, lambda t: t.t().contiguous().t())), ("with gaps", change_at(MATRIX, spread)),
    ("expanded", change_at(MATRIX, lambda t: t[:, :1].expand(t.shape))),
    ("too short", change_at(MATRIX, lambda t: t[1:].clone())), ("of another dtype", change_at(MATRIX, other_dtype)),
    ("freed", change_at(MATRIX, free_storage)), ("cut", change_at(MATRIX, shorten_storage)),
    ("a short field", lambda ts: [torch.zeros(1, END - 1)]),
]  # fmt: skip
FIELDS: list[Misuse] = [
    ("too short", lambda t: t[:, : END - 1].clone()), ("without rows", lambda t: t[0]),
    ("of too few rows", lambda t: t[:0]),
    ("with gaps", spread), ("of another dtype", other_dtype), ("freed", free_storage), ("cut", shorten_storage),
]  # fmt: skip
TABLES: list[Misuse] = [
    ("an offset below zero", entry(0, 0, -8)), ("an offset beyond memory", entry(0, 0, FAR)),
    ("an offset beyond the fields", entry(2, 0, 2**40)), ("a length below zero", entry(0, 1, -1)),
    ("a length beyond memory", entry(0, 1, FAR)), ("a group below zero", entry(0, 2, -1)),
    ("a slot below zero", entry(0, 3, -1)), ("a slot beyond memory", entry(0, 3, FAR)),
    ("segments that overlap", entry(1, 0, 0)), ("of another dtype", lambda t: t.to(torch.int32)),
    ("in another order", lambda t: t.t().contiguous().t()), ("of three columns", lambda t: t[:, :3].clone()),
    ("freed", free_storage),
]  # fmt: skip
HPARAMS: list[Misuse] = [("without groups", lambda t: t[:, :0].clone())]
VECTORS: list[Misuse] = [
    ("too short", lambda t: t.flatten()[:0]),
    ("of another dtype", lambda t: t.to(torch.float16)),
    ("freed", free_storage),
]
# Without a field no offset is read, and a single list cannot have a wrong order.
HARMLESS = {
    ("norm_", "table an offset beyond the fields"),
    ("inner_", "table an offset beyond the fields"),
    ("restore_", "params in another order"),
    ("dual_norm_", "grads in another order"),
}
FIELD_NAMES = {"backup", "mu", "s", "eps", "q", "state0", "state1", "shift", "high_", "low_"}


def misuses(name: str, value: Any) -> list[Misuse]:
    if isinstance(value, list):
        return LISTS if name not in ("weights", "g1") else LISTS[1:]
    if name == "table":
        return TABLES
    if isinstance(value, Tensor) and name in FIELD_NAMES and value.dim() == 2:
        return FIELDS
    return ([*VECTORS, *HPARAMS] if name == "hparams" else VECTORS) if isinstance(value, Tensor) else []


def small_step() -> Step:
    return Step(shapes=[(33,), (5, 7), ()])


def wrong_call(name: str, argument: str, change: Callable[[Any], Any]) -> tuple[Any, Step, list[Any]]:
    """Return the op, the operands that the call must not write, and the arguments, one of which is changed."""
    step = small_step()
    op, args = calls(step)[name]
    position = [a.name for a in op._schema.arguments].index(argument)
    return op, step, [change(value) if i == position else value for i, value in enumerate(args)]


def cases(name: str) -> Iterator[tuple[str, Any, Step, list[Any]]]:
    """Yield the error and a wrong call for every misuse of every argument of an op."""
    op, args = calls(small_step())[name]
    for argument, value in zip(op._schema.arguments, args):
        for words, change in misuses(argument.name, value):
            if (name, f"{argument.name} {words}") not in HARMLESS:
                yield f"{argument.name} {words}", *wrong_call(name, argument.name, change)
    if "hparams" in (a.name for a in op._schema.arguments):
        yield "a group that hparams lacks", *wrong_call(name, "table", entry(0, 2, 1))
    if name == "update_":
        yield "two segments that count in one slot", *wrong_call(name, "table", entry(2, 3, 0))


def digest_operands(step: Step) -> str:
    fields = (step.backup, step.m, step.v, step.q, step.mu, step.s, step.sumsq, step.steps, step.products)
    return digest_of(*step.params, *step.g1, *step.g2, *fields)


@pytest.mark.parametrize("name", native._OPS)
def test_every_misuse_of_a_raw_op_is_an_error(name: str) -> None:
    count = 0
    for words, op, step, args in cases(name):
        old_contents = digest_operands(step)
        with pytest.raises(RuntimeError):
            op(*args)
            pytest.fail(f"accepted: {words}")
        assert digest_operands(step) == old_contents, words
        count += 1
    assert count >= (12 if name == "accumulate_" else 25)


@pytest.mark.parametrize("name", native._OPS)
def test_a_tensor_without_memory_beside_real_ones_is_an_error(name: str) -> None:
    """Such a call is the meta device's, which computes nothing: it is taken only where nothing could be computed."""
    op, args = calls(small_step())[name]
    table = [a.name == "table" for a in op._schema.arguments]

    def meta(value: Any) -> Any:
        if isinstance(value, list):
            return [t.to("meta") for t in value]
        return value.to("meta") if isinstance(value, Tensor) else value

    count = 0
    for i, value in enumerate(args):
        if isinstance(value, (list, Tensor)):
            with pytest.raises(RuntimeError, match="table must be on the CPU, and all other tensors on one device"):
                op(*args[:i], meta(value), *args[i + 1 :])
            count += 1
    assert count >= 3
    op(*(value if is_table else meta(value) for value, is_table in zip(args, table)))


def test_steps_too_few_for_the_slots_are_an_error() -> None:
    op, _, args = wrong_call("update_", "steps", lambda steps: torch.zeros(1, 2))
    with pytest.raises(RuntimeError, match=r"at least 3 slots"):
        op(*args)


@pytest.mark.parametrize("name", ["perturb_", "update_"])
def test_rows_that_are_written_do_not_overlap(name: str) -> None:
    """Two rows of weights with one element in common."""
    step = Step(shapes=[(16,)])
    params = torch.zeros(31).as_strided((2, 16), (15, 1))
    grads, field, h = torch.zeros(2, 16), torch.zeros(2, step.layout.row_size), step.h.expand(2, -1, -1).contiguous()
    with pytest.raises(RuntimeError, match="rows that do not overlap"):
        if name == "perturb_":
            native.perturb_([params], field, [grads], step.table, h, torch.zeros(2, dtype=torch.float64), True)
        else:
            native.update_([params], field, [grads], step.table, h, "sgd")
