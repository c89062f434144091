"""Promises bit for bit: determinism, a row by itself and in a batch, rows that do not move, version counters."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastsam.arena import Layout
from fastsam.backends import Backend
from fastsam_kernels import foreach, rules
from fastsam_kernels.hparams import NUM_HPARAMS, HParam
from tests.helpers.op_cases import BACKENDS, Case, Memory, bits, cases, close, explore, property_test, same_bits


def step(backend: Backend, case: Case) -> dict[str, Tensor]:
    """Call all ops one after the other. Return what they wrote in canonical form (NaN outside the segments)."""
    kernels, memory, device, table = backend.load(), Memory(case, backend.device), backend.device, case.table
    hparams = case.hparams().to(device)
    params = memory.operand("params", case.values("params"), is_written=True)
    grads = memory.operand("grads", case.values("grads"))
    g1 = memory.operand("g1", case.values("g1"))
    backup = memory.field("backup", case.values("params").to(case.backup_dtype), is_written=True)
    q, momentum = (memory.field(n, case.values(n, case.compute).abs()) for n in ("q", "momentum"))
    sumsq, clip_norms = (torch.zeros(case.rows, dtype=torch.float64, device=device) for _ in range(2))
    steps = torch.zeros(case.rows, int(table[:, 3].max()) + 1 if len(table) else 1, device=device)

    kernels.norm_(sumsq, grads, params, table, hparams)
    kernels.perturb_(params, backup, grads, table, hparams, sumsq, True)
    out = {"perturbed": memory.read(params)}
    kernels.perturb_(params, backup, grads, table, hparams, sumsq, False, case.seeds().to(device))
    out["stochastic"] = memory.read(params)
    dual_sums, products = torch.zeros_like(sumsq), torch.zeros(case.rows, 2, dtype=torch.float64, device=device)
    mu, s, eps, shift = (memory.field(n, case.values(n, case.compute)) for n in ("mu", "s", "eps", "shift"))
    kernels.dual_norm_(dual_sums, g1, mu, s, table, hparams)
    kernels.dual_perturb_(params, backup, mu, g1, s, table, hparams, dual_sums, eps=eps)
    kernels.inner_(products, grads, g1, table)
    out |= {name: memory.read(field) for name, field in (("dual", params), ("mu", mu), ("eps", eps))}
    out["dual_sums"] = dual_sums.cpu()[:, None]
    out["products"] = products.cpu()
    kernels.update_norm_(clip_norms, params, backup, g1, table, hparams, g1=grads, q=q)
    operands = {"g1": grads, "q": q, "write_master": True}
    kernels.update_(params, backup, g1, table, hparams, "sgd", [momentum], sumsq_v=clip_norms, shift=shift, **operands)
    out["sgd"] = memory.read(params)
    for name, rule in rules.RULES.items():
        state = [memory.field(f"{name} {field}", case.values(field, case.compute).square() + 1) for field in rule.state]
        counts = {"steps": steps} if rule.counter else {}
        h = case.hparams(name).to(device)
        kernels.update_(params, backup, g1, table, h, name, state, **operands, **counts)
        out |= {f"{name} {i}": memory.read(field) for i, field in enumerate((params, backup, *state))}
    out["momentum"] = memory.read(momentum)
    return out | {"sumsq": sumsq.cpu()[:, None], "clipped": clip_norms.cpu()[:, None], "steps": steps.cpu()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    different = [name for name in a if not same_bits(a[name], b[name])]
    assert not different, f"{different} differ: {[(a[n], b[n]) for n in different[:2]]}"


@property_test(cases())
def test_same_inputs_twice(backend: Backend, case: Case) -> None:
    assert_same(step(backend, case), step(backend, case))


@property_test(cases(), st.integers(0, 3), st.sampled_from((0, 1, 16)))
def test_alignment_changes_no_bit(backend: Backend, case: Case, shift: int, gap: int) -> None:
    assert_same(step(backend, case), step(backend, replace(case, shift=shift, gap=gap)))


@property_test(cases())
def test_a_row_alone_and_in_a_batch(backend: Backend, case: Case) -> None:
    """On CUDA the unfused backends add up with torch's sums, whose order depends on the number of rows: they agree to
    rounding."""
    batch, is_fused = step(backend, case), backend.name in ("native", "triton")
    for r in range(case.rows):
        row, single_row = {name: values[r : r + 1] for name, values in batch.items()}, step(backend, case.row(r))
        if backend.device == "cpu" or is_fused:
            assert_same(row, single_row)
        else:
            for name, values in row.items():
                close(values, single_row[name].double(), case.dtype)


@pytest.mark.parametrize("length", [40, 70_000])
def test_rows_of_equal_scalars_are_rows_alone(length: int) -> None:
    """The backend without compiled kernels makes one call of short rows, and one norm of short tensors."""
    layout, kernels, table_rows = Layout.from_tensors([torch.zeros(3, 5), torch.zeros(length)]), foreach, 3
    hparams = torch.zeros(table_rows, 1, NUM_HPARAMS, dtype=torch.float64)
    hparams[..., HParam.LR], hparams[..., HParam.DECAY], hparams[..., HParam.G2_COEF] = 0.1, 0.01, 1.0
    z, g, m = (torch.randn(table_rows, layout.row_size) for _ in range(3))
    sums = torch.zeros(table_rows, dtype=torch.float64)
    alone = [(z[i : i + 1].clone(), g[i : i + 1], m[i : i + 1].clone(), sums[i : i + 1].clone()) for i in range(3)]
    for z_, g_, m_, sums_ in ((z, g, m, sums), *alone):
        gradients, h = layout.views(g_), hparams[: len(z_)]
        kernels.norm_(sums_, gradients, [], layout.table, h)
        kernels.update_([z_], None, gradients, layout.table, h, "sgd", [m_])
    for joined, single in zip((z, m, sums), zip(*((z, m, s) for z, _, m, s in alone), strict=True), strict=True):
        assert torch.equal(joined, torch.cat(single)) and bool(joined.count_nonzero())


@pytest.mark.parametrize("has_seed", [False, True])
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_usable_norm_do_not_move(backend: Backend, save: bool, has_seed: bool) -> None:
    """A zero, infinite or NaN norm: `z = w`, bit for bit, minus zero included, and a NaN stays one; the other rows
    move."""

    @explore(backend, examples=25)
    @given(cases(max_rows=1), st.permutations((0.0, torch.inf, torch.nan, 4.0)))
    def holds(case: Case, norms: list[float]) -> None:
        case = replace(case, rows=4)
        values = case.values("params")
        values[:, ::7], values[:, 3::7] = -0.0, torch.nan
        memory = Memory(case, backend.device)
        params = memory.operand("params", values, is_written=True)
        backup = memory.field("backup", values.to(case.backup_dtype), is_written=save)
        grads = memory.operand("grads", torch.ones_like(values))
        sumsq = torch.tensor(norms, dtype=torch.float64).to(backend.device)
        hparams = case.hparams(RHO=10.0, ADAPTIVE=0.0).to(backend.device)
        memory.snapshot()
        seeds = torch.arange(4, device=backend.device) if has_seed else None
        backend.load().perturb_(params, backup, grads, case.table, hparams, sumsq, save, seeds)
        memory.check()
        new_weights, mask = memory.read(params), case.mask()
        for r, norm in enumerate(norms):
            old_weights = values[r][mask[r]]
            if norm == 4.0:
                usable = ~old_weights.isnan()
                assert (new_weights[r][mask[r]] != old_weights)[usable].all()
            elif case.dtype != case.compute:  # a NaN that went through float32 is a NaN still
                assert torch.equal(new_weights[r][mask[r]].isnan(), old_weights.isnan())
                assert same_bits(new_weights[r][mask[r]].nan_to_num(7.0), old_weights.nan_to_num(7.0))
            else:
                assert same_bits(new_weights[r][mask[r]], old_weights)

    holds()


@pytest.mark.parametrize("backend", BACKENDS)
def test_master_copies_follow_weights_that_someone_wrote(backend: Backend) -> None:
    """If z is not the rounding of its master, z is the weight; otherwise the master keeps its additional digits."""
    master = torch.tensor([[1.0009765625, 1.0, 3.0, 0.1, 5.0]], device=backend.device)
    params = master.to(torch.bfloat16)
    params[0, 2] = 2.5
    expected = torch.where(torch.tensor([[False, False, True, False, False]]).to(master.device), 2.5, master)
    hparams = torch.zeros(1, 1, NUM_HPARAMS, dtype=torch.float64, device=backend.device)
    hparams[..., HParam.RHO] = 1.0
    table, sumsq = torch.tensor([[0, 5, 0, 0]]), torch.ones(1, dtype=torch.float64, device=backend.device)
    grads = [torch.full((5,), 2.0, dtype=torch.bfloat16, device=backend.device)]
    backend.load().perturb_([params], master, grads, table, hparams, sumsq, True)
    assert torch.equal(master, expected)
    assert torch.equal(params, (expected + 2.0).to(torch.bfloat16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_that_saved_the_weights_is_stale_after_every_write(backend: Backend) -> None:
    kernels, device = backend.load(), backend.device
    table = Layout.from_tensors([torch.zeros(3, 4)]).table
    hparams = torch.zeros(1, 1, NUM_HPARAMS, dtype=torch.float64, device=device)
    sumsq, grads = torch.ones(1, dtype=torch.float64, device=device), [torch.ones(3, 4, device=device)]
    backup, first, second = (torch.zeros(1, 256, device=device) for _ in range(3))
    steps = torch.zeros(1, 1, device=device)
    writes = {
        "perturb_": lambda params: kernels.perturb_(params, backup, grads, table, hparams, sumsq, True),
        "restore_": lambda params: kernels.restore_(params, backup, table),
        "dual_perturb_": lambda params: kernels.dual_perturb_(
            params, backup, first, grads, second, table, hparams, sumsq
        ),
        "update_": lambda params: kernels.update_(params, backup, grads, table, hparams, "sgd"),
        "update_ with steps": lambda params: kernels.update_(
            params, backup, grads, table, hparams, "adam", [first, second], steps=steps
        ),
    }
    for name, write in writes.items():
        weight = torch.randn(3, 4, device=device, requires_grad=True)
        loss = (weight * weight).sum()
        with torch.no_grad():
            write([weight])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
            pytest.fail(f"{name}: autograd was not told")


def test_bits_tells_zeros_and_nans_apart() -> None:
    values = torch.tensor([0.0, -0.0, torch.nan])
    assert same_bits(values, values.clone())
    assert bits(values)[0] != bits(values)[1]
