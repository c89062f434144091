"""Ops on tables and tensors that are almost right.

An op must not access memory outside of its operands, and must not return numbers that differ from the reference. Every
operand lies between pages that cannot be accessed (`guard_pages`), so that an access beyond its end raises a signal.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastsam_kernels import native, reference
from tests.attack.trials import Attack, Trial
from tests.helpers.guard_pages import Guarded
from tests.helpers.misuses import entry, free_storage, other_dtype, shorten_storage, spread
from tests.helpers.native_step import Step, calls
from tests.helpers.op_cases import bits
from tests.helpers.tolerances import TOLERANCE

TIMES = 60  # trials that share a process
LENGTHS = (0, 1, 2, 15, 16, 17, 33, 130, 1025, 4097)
FAR = (-(2**63), -(2**40), -16, -1, 0, 1, 7, 16, 2**31, 2**40, 2**62, 2**63 - 1)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.bool, torch.complex64)
RULES = ("sgd", "adam", "adagrad", "rmsprop", "lion", "x", "")
Refusal = (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError)
Arguments = dict[str, Any]


def make_arguments(rng: random.Random) -> tuple[str, Arguments]:
    """Return an op and valid arguments: a few segments of any lengths, in any dtype."""
    shapes: list[tuple[int, ...]] = [(rng.choice(LENGTHS),) for _ in range(rng.randint(0, 3))] + [(5, 7)]
    rng.shuffle(shapes)
    step = Step(rng.randrange(10**6), rng.choice(FLOATS), shapes)
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    for field in (step.backup, step.m, step.q, step.mu, step.s):
        field.normal_(generator=generator)
    step.v.uniform_(0.1, 1.0, generator=generator)
    step.sumsq.fill_(100.0)
    op, arguments = calls(step)[name := rng.choice(native._OPS)]
    return name, dict(zip([a.name for a in op._schema.arguments], arguments, strict=False))


# --- what is wrong ---


def _other_shape(rng: random.Random, t: Tensor) -> Tensor:
    sizes = [rng.choice([0, 1, 2, n, n + 1, max(n - 1, 0)]) for n in t.shape] or [rng.choice([0, 1, 2])]
    return torch.zeros(sizes, dtype=t.dtype)


CHANGES: tuple[Callable[[random.Random, Tensor], Any], ...] = (
    _other_shape,
    lambda rng, t: free_storage(t),
    lambda rng, t: shorten_storage(t) if t.numel() else t,
    lambda rng, t: spread(t) if t.dim() else t,
    lambda rng, t: other_dtype(t),
    lambda rng, t: t.to(rng.choice(DTYPES)),
    lambda rng, t: t.t().contiguous().t() if t.dim() == 2 else t.flip(0) if t.dim() else t,
    lambda rng, t: t[:1].expand(t.shape) if t.dim() else t,
    lambda rng, t: t.flatten(),
    lambda rng, t: t[None],
    lambda rng, t: t[..., : rng.randrange(t.shape[-1] + 1)] if t.dim() else t,
    lambda rng, t: torch.cat([t, t], -1) if t.dim() else t,
    lambda rng, t: t.to("meta"),
    lambda rng, t: t.to_sparse() if t.dim() else t,
    lambda rng, t: t.new_zeros(rng.choice([0, 1, 3])),
    lambda rng, t: None,
)


def _table(rng: random.Random, table: Tensor) -> Any:
    """Return a table with wrong entries, with rows that are repeated, missing or reordered, or no table."""
    kind = rng.randrange(5)
    if kind == 0 or not len(table):
        return rng.choice(CHANGES)(rng, table)
    if kind == 1:
        return table[[rng.randrange(len(table)) for _ in range(rng.randint(0, len(table) + 1))]].clone()
    for _ in range(rng.randint(1, 3)):
        row, column = rng.randrange(len(table)), rng.randrange(4)
        neighbour = int(table[row, column]) + rng.randint(-2, 2)
        table = entry(row, column, neighbour if kind == 2 else rng.choice(FAR))(table)
    return table


def _list(rng: random.Random, tensors: list[Tensor]) -> Any:
    """Change, delete, repeat or reorder tensors of a list, or put one field in place of the list."""
    kind, result = rng.randrange(6), list(tensors)
    if kind == 0 or not result:
        return [] if rng.random() < 0.5 else [torch.zeros(rng.choice([1, 2]), rng.choice([0, 8, 64, 8192]))]
    place = rng.randrange(len(result))
    if kind == 1:
        del result[place]
    elif kind == 2:
        result.insert(place, result[place].clone())
    elif kind == 3:
        rng.shuffle(result)
    else:
        change = rng.choice(CHANGES[:-1])(rng, result[place])
        result[place] = change
    return result


def damage_arguments(rng: random.Random, arguments: Arguments) -> Arguments:
    """Change one to three arguments."""
    arguments = dict(arguments)
    for name in rng.sample(sorted(arguments), min(len(arguments), rng.choice([1, 1, 2, 3]))):
        value = arguments[name]
        if name == "table":
            arguments[name] = _table(rng, value)
        elif name == "rule":
            arguments[name] = rng.choice(RULES)
        elif isinstance(value, list):
            arguments[name] = _list(rng, value)
        elif isinstance(value, Tensor):
            arguments[name] = rng.choice(CHANGES)(rng, value)
        elif isinstance(value, bool):
            arguments[name] = not value
        elif isinstance(value, float):
            arguments[name] = rng.choice([0.0, -1.0, 1e300, float("nan"), float("inf")])
    return arguments


# --- where it lies, and what became of it ---


def _copy_operand(value: Any, make: Callable[[int, torch.dtype], Tensor]) -> Any:
    """Return a copy of `value` in the storage that `make` allocates, with the same strides.

    Values without dense CPU storage are returned unchanged.
    """
    if isinstance(value, list):
        return [_copy_operand(entry, make) for entry in value]
    dense = isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided
    if not dense or value.is_complex():
        return value
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
    if (
        value.storage_offset() + span
    ) * value.element_size() > value.untyped_storage().nbytes() or value.dtype == torch.bool:
        return value
    base = make(span, value.dtype)
    base.copy_(value.as_strided((span,), (1,)))
    return base.as_strided(value.shape, value.stride())


def _plain(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype)


def _tensors(arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
    """Yield the dense CPU tensors of the arguments by name."""
    for name, value in arguments.items():
        for i, t in enumerate(value if isinstance(value, list) else [value]):
            is_dense = isinstance(t, Tensor) and t.device.type == "cpu" and t.layout == torch.strided
            if is_dense and t.untyped_storage().nbytes() >= t.numel() * t.element_size():
                yield f"{name}[{i}]" if isinstance(value, list) else name, t


def _is_unchanged(arguments: Arguments, old_arguments: Arguments) -> bool:
    pairs = zip(_tensors(arguments), _tensors(old_arguments), strict=True)
    return all(torch.equal(_bits(a), _bits(b)) for (_, a), (_, b) in pairs)


def _bits(t: Tensor) -> Tensor:
    return bits(t.contiguous()) if t.is_floating_point() else t


def _assert_same_numbers(arguments: Arguments, expected: Arguments, name: str) -> None:
    """Compare with the tolerance of the operand of lowest precision, unless the reference gives non-finite numbers."""
    numbers = [t for _, t in _tensors(expected) if t.is_floating_point()]
    if not all(t.isfinite().all() for t in numbers):
        return
    rtol, atol = (max((TOLERANCE[t.dtype][i] for t in numbers), default=0.0) for i in range(2))
    for (operand, a), (_, b) in zip(_tensors(arguments), _tensors(expected), strict=True):
        if a.is_floating_point():
            size = max(1.0, float(b.abs().max())) if b.numel() else 1.0
            excess = (a.double() - b.double()).abs() - 4 * rtol * b.double().abs() - 4 * atol * size
            assert not (excess > 0).any(), (
                f"{name}: {operand} differs from the reference by up to {(a - b).abs().max():g}"
            )
        else:
            assert torch.equal(a, b), f"{name}: {operand} differs from the reference"


# --- the attacks ---


def _reference_arguments(name: str, arguments: Arguments) -> Arguments:
    """Return the arguments as the functions of `fastsam.ops` and the reference take them."""
    arguments = dict(arguments)
    if name == "update_":
        arguments["state"] = [arguments.pop(f"state{i}") for i in range(3)]
        while arguments["state"] and arguments["state"][-1] is None:
            arguments["state"].pop()
    if "g1" in arguments:
        arguments["g1"] = arguments["g1"] or None
    return arguments


def _call(name: str, arguments: Arguments, call: Callable[[Arguments], object]) -> bool:
    """Return True if the op accepted the arguments.

    A refused call must not write. An accepted call must give the numbers of the reference, if the reference accepts it
    too.
    """
    memory = Guarded(at_end=True)
    operands = {key: _copy_operand(value, memory.tensor) for key, value in arguments.items()}
    old_operands = {key: _copy_operand(value, _plain) for key, value in arguments.items()}
    expected = {key: _copy_operand(value, _plain) for key, value in arguments.items()}
    try:
        call(operands)
    except Refusal as error:
        assert str(error) or isinstance(error, NotImplementedError), f"{name} is refused without words: {error!r}"
        assert _is_unchanged(operands, old_operands), f"{name} was refused ({error}), and something was written"
        return False
    try:
        getattr(reference, name)(**_reference_arguments(name, expected))
    except Refusal:
        return True
    _assert_same_numbers(operands, expected, name)
    return True


def call_raw_op(trial: Trial) -> int:
    """`torch.ops.fastsam.*`, called past every check in Python; one call in eight with right arguments."""
    name, arguments = make_arguments(trial.rng)
    is_valid = trial.rng.randrange(8) == 0
    arguments = arguments if is_valid else damage_arguments(trial.rng, arguments)
    print(name, {k: _describe(v) for k, v in arguments.items()}, flush=True)
    op = getattr(torch.ops.fastsam, name).default
    is_accepted = _call(name, arguments, lambda operands: op(*operands.values()))
    assert is_accepted or not is_valid, f"{name} refuses what is right"
    return 1


def _describe(value: Any) -> Any:
    if isinstance(value, list):
        return [_describe(entry) for entry in value]
    if not isinstance(value, Tensor):
        return value
    is_table = value.dtype == torch.int64 and value.dim() == 2 and any(t is value for _, t in _tensors({"": value}))
    numbers = value.tolist() if is_table else ""
    return f"{str(value.dtype)[6:]}{list(value.shape)}{numbers}"


ATTACKS = (
    Attack(
        "raw-ops",
        "compiled ops touch nothing outside of their operands and give the reference's numbers, or refuse",
        call_raw_op,
        share=1.5,
        values=TIMES,
        why_not=lambda: native.why_not("cpu"),
    ),
)  # fmt: skip
