"""The op surface says what it expected, what it got, and writes nothing when it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastsam import backends, ops
from fastsam.arena import Layout
from fastsam_kernels.columns import WIDTH, Column
from tests.helpers.misuses import cut, freed

F32, F64 = torch.float32, torch.float64
SHAPES = ((4, 3), (5,), (2, 3, 4, 4))
FIELDS = ("origin", "momentum_buffer", "q", "exp_avg", "exp_avg_sq", "mu", "s", "eps", "shift")
Change = Callable[[dict[str, Any]], None]


def arguments(rows: int = 1) -> dict[str, Any]:
    """Arguments that fit, by the names of the ops' parameters."""
    lead = () if rows == 1 else (rows,)
    z, grads, g1 = ([torch.randn(*lead, *shape) for shape in SHAPES] for _ in range(3))
    layout = Layout.of([torch.zeros(shape) for shape in SHAPES], groups=[0, 1, 0])
    hyper = torch.zeros(rows, 2, WIDTH, dtype=F64)
    hyper[..., Column.A], hyper[..., Column.LR], hyper[..., Column.RHO] = 1.0, 0.1, 1.0
    return {
        "z": z,
        "grads": grads,
        "g1": g1,
        "table": layout.table,
        "hyper": hyper,
        "sumsq": torch.ones(rows, dtype=F64),
        "sumsq_v": torch.ones(rows, dtype=F64),
        "steps": torch.zeros(rows, 3),
        "grad_scale": torch.ones(1),
        "found_inf": torch.zeros(1),
        "out": torch.ones(rows, 2, dtype=F64),
    } | {name: torch.zeros(rows, layout.stride) for name in FIELDS}


PARAMETERS: dict[str, tuple[str, ...]] = {
    "norm_": ("sumsq", "grads", "z", "table", "hyper"),
    "perturb_": ("z", "origin", "grads", "table", "hyper", "sumsq"),
    "restore_": ("z", "origin", "table"),
    "dual_norm_": ("sumsq", "grads", "mu", "s", "table", "hyper"),
    "dual_perturb_": ("z", "origin", "mu", "grads", "s", "table", "hyper", "sumsq"),
    "inner_": ("out", "grads", "g1", "table"),
    "update_norm_": ("sumsq", "z", "origin", "grads", "table", "hyper"),
    "update_ sgd": ("z", "origin", "grads", "table", "hyper"),
    "update_ adam": ("z", "origin", "grads", "table", "hyper"),
}
OPTIONS: dict[str, tuple[str, ...]] = {
    "dual_perturb_": ("eps",),
    "update_norm_": ("g1", "q", "grad_scale"),
    "update_ sgd": ("g1", "q", "sumsq_v", "grad_scale", "found_inf", "shift"),
    "update_ adam": ("steps", "grad_scale", "found_inf"),
}
STATE = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq")}


def call(op: str, args: dict[str, Any], **more: Any) -> None:
    positional = [args[name] for name in PARAMETERS[op]] + ([True] if op == "perturb_" else [])
    options = {name: args[name] for name in OPTIONS.get(op, ())}
    function, *rule = op.split()
    if rule:
        positional += [*rule, [args[name] for name in STATE[rule[0]]]]
    getattr(ops, function)(*positional, **options, **more)


def everything(args: dict[str, Any]) -> list[Tensor]:
    values = (value if isinstance(value, list) else [value] for value in args.values())
    return [t for value in values for t in value if t is not None]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("op", PARAMETERS)
def test_arguments_that_fit_are_taken(op: str, rows: int) -> None:
    args = arguments(rows)
    before = [z.clone() for z in args["z"]]
    call(op, args, backend="reference")
    if op == "perturb_":
        with pytest.raises(ValueError, match=rf"seed must be contiguous int64 \[{rows}\] on cpu, got torch.int32"):
            call(op, args, seed=torch.zeros(rows, dtype=torch.int32))
    if "z" in PARAMETERS[op] and "norm" not in op:
        assert not all(torch.equal(a, b) for a, b in zip(before, args["z"], strict=True))


def put(name: str, value: Any) -> Change:
    return lambda args: args.__setitem__(name, value(args[name]) if callable(value) else value)


def put_one(name: str, index: int, value: Callable[[Tensor], Tensor]) -> Change:
    return lambda args: args[name].__setitem__(index, value(args[name][index]))


def enter(row: int, column: int, value: int) -> Change:
    return lambda args: args["table"].__setitem__((row, column), value)


ALL = tuple(PARAMETERS)
WITH_Z = ("perturb_", "restore_", "dual_perturb_", "update_norm_", "update_ sgd", "update_ adam")
WITH_HYPER = ("norm_", "perturb_", "dual_norm_", "dual_perturb_", "update_norm_", "update_ sgd", "update_ adam")
WITH_SUMS = ("norm_", "perturb_", "dual_norm_", "dual_perturb_", "update_norm_")
TWO_LISTS = tuple(op for op in WITH_HYPER if op != "dual_norm_")
DUAL, INNER = ("dual_norm_", "dual_perturb_"), ("inner_",)
ADAM, SGD = ("update_ adam",), ("update_ sgd",)
CHANGES: list[tuple[tuple[str, ...], Change, str]] = [
    (ALL, put("table", lambda t: t.int()), r"table must be contiguous int64 \[segments, 4\] on the CPU.* got "
                                           r"torch.int32 \[3, 4\]"),
    (ALL, put("table", lambda t: t[:, :3].contiguous()), r"got torch.int64 \[3, 3\]"),
    (ALL, put("table", lambda t: t.t().contiguous().t()), r"table must be contiguous"),
    (ALL, enter(1, 0, -16), "negative entry"),
    (WITH_Z, enter(1, 0, 2**63 - 1), r"at least 922337203685477581\d"),
    (ALL, enter(1, 0, 8), "overlap: one begins at 8, another ends at 12"),
    (WITH_HYPER, enter(1, 2, 2), r"names parameter group 2 \(counted from 0\), but hyper has 2 groups"),
    (WITH_HYPER, put("hyper", lambda h: h.float()), rf"hyper must be .* float64 \[rows, groups, {WIDTH}\] on cpu, got "
                                                    rf"torch.float32"),
    (WITH_HYPER, put("hyper", lambda h: h[0]), r"got torch.float64 \[2, 16\]"),
    (WITH_HYPER, put("hyper", lambda h: h.to("meta")), "on meta"),
    (WITH_HYPER, put("hyper", lambda h: h[:, :, :1].expand(-1, -1, WIDTH)), "hyper must be contiguous"),
    (WITH_SUMS, put("sumsq", torch.ones(1)), r"sumsq must be contiguous float64 \[1\] on cpu, got torch.float32 \[1\]"),
    (WITH_SUMS, put("sumsq", torch.ones(2, dtype=F64)), r"sumsq must be .*\[1\].* got torch.float64 \[2\]"),
    (SGD, put("sumsq_v", torch.ones((), dtype=F64)), "sumsq_v must be contiguous float64"),
    (WITH_Z, put("z", lambda z: z[:2]), r"z must be one tensor per segment \(3\) or one field, got 2 tensors"),
    (WITH_Z, put_one("z", 1, lambda t: t.double()), r"z\[1\] must be torch.float32 with 1 x 5 elements on cpu, got "
                                                    r"torch.float64"),
    (WITH_Z, put_one("z", 1, lambda t: t[:4]), r"z\[1\] must be .* 1 x 5 elements .* got torch.float32 \[4\]"),
    (WITH_Z, put_one("z", 0, lambda t: torch.zeros(4, 6)[:, ::2]),
        r"z\[0\] must be dense \(pass tensor.contiguous\(\)\)"),
    (WITH_Z, put_one("z", 1, lambda t: t.to("meta")), r"z\[1\] must be .* on cpu, got .* on meta"),
    (WITH_Z, put("z", [torch.zeros(1, 20)]), r"z must be torch.float32 \[1, at least 1\d\d\] on cpu with unit stride"),
    (WITH_HYPER, put_one("grads", 1, lambda t: t.half()), r"grads\[1\] must be torch.float32"),
    (WITH_HYPER, put("grads", []), r"grads must be one tensor per segment \(3\) or one field, got 0 tensors"),
    (TWO_LISTS, put_one("grads", 2, lambda t: t.contiguous(memory_format=torch.channels_last)),
        r"different orders, strides"),
    (SGD, put_one("g1", 2, lambda t: t.contiguous(memory_format=torch.channels_last)),
        r"z\[2\] and g1\[2\] have .* in different orders"),
    (SGD, put("g1", lambda g: g[1:]), r"g1 must be one tensor per segment"),
    (WITH_Z, put("origin", lambda o: o.double()), r"origin must be torch.float32 \[1, at least 1\d\d\] .* got "
                                                  r"torch.float64"),
    (WITH_Z, put("origin", lambda o: o[:, :50]), r"origin must be .* got torch.float32 \[1, 50\]"),
    (WITH_Z, put("origin", lambda o: o[0]), r"origin must be"),
    (WITH_Z, put("origin", lambda o: torch.zeros(1, 2 * o.shape[1])[:, ::2]), "with unit stride"),
    (("update_norm_", "update_ sgd"), put("q", lambda q: q.half()), r"q must be torch.float32"),
    (SGD, put("momentum_buffer", lambda m: m.repeat(2, 1)), r"momentum_buffer must be torch.float32 \[1, at least"),
    (DUAL, put("mu", lambda m: m.half()), "mu must be torch.float32"),
    (DUAL, put("s", lambda s: s[:, :3]), r"s must be torch.float32 \[1, at least 1\d\d\] .* torch.float32 \[1, 3\]"),
    (("dual_perturb_",), put("eps", lambda e: e.double()), "eps must be torch.float32"),
    (SGD, put("shift", lambda s: s.double()), "shift must be torch.float32"),
    (INNER, put("out", torch.ones(2, dtype=F64)), r"out must be contiguous float64 \[rows, 2\], got torch.float64 "
                                                  r"\[2\]"),
    (INNER, put("out", torch.ones(1, 2)), r"out must be .* got torch.float32 \[1, 2\]"),
    (INNER, put_one("g1", 1, lambda t: t.double()), r"y\[1\] must be torch.float32"),
    (INNER, put_one("g1", 2, lambda t: t.contiguous(memory_format=torch.channels_last)),
        r"x\[2\] and y\[2\] have .* in different orders"),
    (ADAM, put("exp_avg", lambda m: m.bfloat16()), "exp_avg must be torch.float32"),
    (ADAM, put("exp_avg_sq", lambda m: m[:, :3]), "exp_avg_sq must be torch.float32"),
    (ADAM, put("steps", torch.zeros(1, 2)), r"steps must be contiguous float32 \[1, at least 3 slots\] on cpu, got "
                                            r"torch.float32 \[1, 2\]"),
    (ADAM, put("steps", torch.zeros(3)), "steps must be"),
    (ADAM, put("steps", None), "adam counts steps"),
    (ADAM, put("exp_avg_sq", None), "the state of adam needs exp_avg_sq"),
    (ADAM, put("steps", torch.zeros(1, 3, dtype=torch.int64)), "steps must be .* got torch.int64"),
    (("update_norm_", *SGD, *ADAM), put("grad_scale", torch.ones(1, dtype=F64)),
        "grad_scale must be one float32 number on cpu"),
    ((*SGD, *ADAM), put("found_inf", torch.zeros(2)), r"found_inf must be one float32 number on cpu, got torch.float32 "
                                                      r"\[2\]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "change", "message"), [(op, change, message) for many, change, message in CHANGES for op in many]
)
def test_arguments_that_do_not_fit_are_refused(op: str, change: Change, message: str) -> None:
    args = arguments()
    change(args)
    before = [t.clone() for t in everything(args)]
    with pytest.raises(ValueError, match=f"{op.split()[0]}: .*{message}"):
        call(op, args)
    for a, b in zip(before, everything(args), strict=True):
        assert a.is_meta or torch.equal(a, b)


@pytest.mark.parametrize("op", PARAMETERS)
def test_what_is_no_tensor_is_told_by_name(op: str) -> None:
    """Among them None where a tensor is needed, a tensor where a list is, and a sparse one."""
    for name in (*PARAMETERS[op], *OPTIONS.get(op, ())):
        args = arguments()
        several = isinstance(args[name], list)
        told = "[a-z0-9_]+" if name == "z" or "g1" in PARAMETERS[op] else name  # there they are called weights, x and y
        wrong = [["x"], 3, args["sumsq"]] if several else ["x", 3, [args["sumsq"]]]
        for value in [*wrong, *([None] if name in PARAMETERS[op] and name != "origin" else [])]:
            with pytest.raises(
                TypeError, match=rf"^{op.split()[0]}: {told}(\[0\])? must be a (list of tensors|tensor), got"
            ):
                call(op, args | {name: value})
        sparse = [t.to_sparse() for t in args[name]] if several else args[name].to_sparse()
        with pytest.raises(ValueError, match=rf"^{op.split()[0]}: {told}(\[0\])? must be dense .*sparse"):
            call(op, args | {name: sparse})


@pytest.mark.parametrize("change", [freed, cut])
@pytest.mark.parametrize("op", PARAMETERS)
def test_a_tensor_without_its_memory_is_told_by_name(op: str, change: Callable[[Tensor], Tensor]) -> None:
    for name in (*PARAMETERS[op], *OPTIONS.get(op, ())):
        args = arguments()
        value = args[name]
        for backend in ("reference", "auto"):
            with pytest.raises(
                ValueError, match=rf"^{op.split()[0]}: \w+(\[0\])? needs \d+ bytes of its storage, which has \d+"
            ):
                call(
                    op,
                    args | {name: [change(t) for t in value] if isinstance(value, list) else change(value)},
                    backend=backend,
                )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put_one("z", 0, lambda t: t[:1].expand(2, 4, 3)), r"z\[0\] must be of rows that do not overlap"),
        (put_one("z", 0, lambda t: t.reshape(4, 6)), r"z\[0\] must be 2 dense rows in its first dimension"),
        (put_one("z", 0, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)), r"z\[0\] must be 2 dense rows"),
        (put("origin", lambda o: o[:1].expand(2, -1)), "origin must be of rows that do not overlap"),
    ],
)
def test_rows_must_be_rows(change: Change, message: str) -> None:
    args = arguments(rows=2)
    change(args)
    with pytest.raises(ValueError, match=message):
        call("perturb_", args)


def test_rules_and_their_state_are_checked() -> None:
    args = arguments()
    operands = [args[name] for name in PARAMETERS["update_ sgd"]]
    for rule, state, options, message in (
        ("adamw", [], {}, "rule must be one of adagrad, adam, .*sgd.*, got 'adamw'"),
        ("sgd", [args["mu"], args["s"]], {}, "update_: the state of sgd has 1 fields, got 2"),
        ("sgd", [], {"steps": args["steps"]}, "update_: sgd does not count steps"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.update_(*operands, rule, state, **options)


def test_only_what_is_read_may_be_one_vector_for_all_rows() -> None:
    args = arguments(rows=2)
    for name in ("s", "origin", "shift"):
        args[name] = args[name][:1].expand(2, -1)
    call("dual_perturb_", args, backend="reference")
    call("update_ sgd", args, backend="reference")
    for name in ("mu", "eps"):
        changed = args | {name: args[name][:1].expand(2, -1)}
        with pytest.raises(ValueError, match=f"{name} must be of rows that do not overlap"):
            call("dual_perturb_", changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3).half()}, r"x must be float32 or float64 \[3\] or rows of it, .* got torch.float16"),
        ({"x": torch.ones(6)[::2]}, r"x must be float32 .*, dense, .* got torch.float32 \[3\] with strides \(2,\)"),
        ({"x": torch.ones(2, 6)[:, ::2]}, r"x must be .* got torch.float32 \[2, 3\] with strides \(6, 2\)"),
        ({"x": torch.ones(2, 4)}, r"x must be .* got torch.float32 \[2, 4\]"),
        ({"x": torch.ones(1, 1, 3)}, r"x must be .* got torch.float32 \[1, 1, 3\]"),
        ({"high_": torch.zeros(3)}, r"high_ must be contiguous torch.int64 \[3\] on cpu, got torch.float32"),
        ({"low_": torch.zeros(2).long()}, r"low_ must be contiguous torch.int64 \[3\] on cpu, got torch.int64 \[2\]"),
        ({"base": torch.ones(3).double()}, r"base must be contiguous torch.float32 \[3\] on cpu, got torch.float64"),
        ({"base": torch.ones(1, 3)}, r"base must be contiguous torch.float32 \[3\] on cpu, got torch.float32 \[1, 3\]"),
        ({"largest_": torch.ones(1)}, r"largest_ must be contiguous torch.float64 \[1\] on cpu, got torch.float32"),
        (
            {"x": torch.ones(2, 3), "largest_": torch.ones(1).double()},
            r"largest_ must be contiguous torch.float64 \[2\]",
        ),
    ],
)
def test_accumulate_refuses(change: dict[str, Tensor], message: str) -> None:
    args = {"high_": torch.zeros(3).long(), "low_": torch.zeros(3).long(), "x": torch.ones(3)}
    ops.accumulate_(**args, factor=0.5, backend="reference")
    assert args["high_"].tolist() == [2**27] * 3
    with pytest.raises(ValueError, match=f"accumulate_: {message}"):
        ops.accumulate_(**args | change, factor=0.5)


def test_adaptive_groups_need_the_weights() -> None:
    args = arguments()
    args["hyper"][:, 1, Column.ADAPTIVE] = 1.0
    with pytest.raises(ValueError, match=r"weights must be one tensor per segment \(3\) or one field, got 0 tensors"):
        ops.norm_(args["sumsq"], args["grads"], [], args["table"], args["hyper"])


def test_a_field_without_padding_is_a_field() -> None:
    """Two segments that fill a row: one tensor with as many elements as both is the field, not a list that is too
    short."""
    table, hyper = torch.tensor([[0, 16, 0, 0], [16, 16, 0, 1]]), torch.zeros(1, 1, WIDTH, dtype=F64)
    sumsq, grads = torch.zeros(1, dtype=F64), torch.full((1, 32), 2.0)
    ops.norm_(sumsq, [grads], [], table, hyper, backend="reference")
    assert sumsq.item() == 128.0


def test_what_was_asked_for_by_name_serves_or_says_why() -> None:
    args = arguments()
    with pytest.raises(
        ValueError, match=r"backend must be one of 'auto', 'native', 'triton', 'foreach', 'reference', got 'cudnn'"
    ):
        call("restore_", args, backend="cudnn")
    args["z"], args["origin"] = [z.to(torch.int32) for z in args["z"]], args["origin"].to(torch.int32)
    with pytest.raises(ValueError, match="float32, float64, float16 or bfloat16, got torch.int32|origin must be"):
        call("restore_", args)
    with pytest.raises(
        RuntimeError,
        match=r"backend 'native' cannot serve torch.float32 on meta: native does not serve the device 'meta'",
    ):
        backends.select("native", torch.device("meta"), F32)
