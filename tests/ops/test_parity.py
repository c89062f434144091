"""Every backend against the reference in float64, on upcast inputs; guard bands around every buffer; outputs that start
as NaN."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastsam.backends import Backend
from fastsam_kernels import reference, rules
from fastsam_kernels.hparams import NUM_HPARAMS, HParam
from tests.helpers.op_cases import (
    BACKENDS,
    Case,
    Memory,
    cases,
    close,
    explore,
    nan,
    property_test,
    resync,
    same_bits,
)

OPTIONS = st.fixed_dictionaries({name: st.booleans() for name in ("backup", "g1", "q", "shift", "grad_scale", "flag")})
SCALE = 8.0


@property_test(cases(), st.booleans(), st.booleans())
def test_norm(backend: Backend, case: Case, adaptive: bool, accumulate: bool) -> None:
    hparams = case.hparams() if adaptive else case.hparams(ADAPTIVE=0)
    grads, weights = case.values("grads"), case.values("weights")
    start = case.sums() if accumulate else torch.full((case.rows,), torch.nan, dtype=torch.float64)
    expected = start.clone()
    records = [weights.double()] if adaptive else []
    reference.norm_(expected, [grads.double()], records, case.table, hparams, accumulate)

    memory = Memory(case, backend.device)
    operands = memory.operand("grads", grads), memory.operand("weights", weights) if adaptive else []
    sumsq = start.to(backend.device)
    memory.snapshot()
    backend.load().norm_(sumsq, *operands, case.table, hparams.to(backend.device), accumulate)
    memory.check()
    close(sumsq, expected, case.compute)


@property_test(cases(), st.booleans(), examples=30)
def test_perturb(backend: Backend, case: Case, save: bool) -> None:
    hparams, sumsq, params, grads = case.hparams(), case.sums(), case.values("params"), case.values("grads")
    backup = params.to(case.backup_dtype)
    if case.master:  # some weights were written since the master copy was made: z is no longer its rounding there
        backup = backup + 1e-6
        backup = torch.where(case.values("written").double() > 1, backup + 1, backup)
    elif save:
        backup = nan(case, case.backup_dtype)
    w = (resync(backup, params) if case.master else params.double()) if save else backup.double()
    expected = torch.zeros_like(w)
    reference.perturb_([expected], w.clone(), [grads.double()], case.table, hparams, sumsq, False)

    memory = Memory(case, backend.device)
    placed_params = memory.operand("params", params if save else nan(case, case.dtype), is_written=True)
    placed_backup = memory.field("backup", backup, is_written=save)
    placed_grads = memory.operand("grads", grads)
    memory.snapshot()
    args = case.table, hparams.to(backend.device), sumsq.to(backend.device), save
    backend.load().perturb_(placed_params, placed_backup, placed_grads, *args)
    memory.check()
    mask = case.mask()
    close(memory.read(placed_params)[mask], expected[mask])
    assert torch.equal(memory.read(placed_backup)[mask].double(), w[mask])


@property_test(cases(), st.booleans(), examples=30)
def test_perturb_with_stochastic_rounding(backend: Backend, case: Case, save: bool) -> None:
    """The same bits as the reference in the same dtypes. float32 and float64 take no notice: they have the bits that
    they have without seeds (not always the reference's: MKL's root of a float64, which is torch's, is not always the
    nearest)."""
    hparams, sumsq, params, grads = case.hparams(), case.sums(), case.values("params"), case.values("grads")
    params[:, ::3] *= 2.0**-14  # subnormal float16 numbers among them
    backup = params.to(case.backup_dtype, copy=True)
    if case.master:
        backup = backup * (1 + 1e-3 * case.values("written").to(case.compute))
    kernels, seeds, device = (
        (backend.load(), None, backend.device) if case.dtype == case.compute else (reference, case.seeds(), "cpu")
    )
    params64, backup64, *operands = (t.to(device, copy=True) for t in (params, backup, grads, hparams, sumsq))
    kernels.perturb_([params64], backup64, operands[:1], case.table, *operands[1:], save, seeds)

    memory = Memory(case, backend.device)
    placed_params = memory.operand("params", params if save else nan(case, case.dtype), is_written=True)
    placed_backup, placed_grads = memory.field("backup", backup, is_written=save), memory.operand("grads", grads)
    memory.snapshot()
    args = [t.to(backend.device) for t in (hparams, sumsq)]
    backend.load().perturb_(
        placed_params, placed_backup, placed_grads, case.table, *args, save, case.seeds().to(backend.device)
    )
    memory.check()
    mask = case.mask()
    assert same_bits(memory.read(placed_params)[mask], params64.cpu()[mask])
    assert same_bits(memory.read(placed_backup)[mask], backup64.cpu()[mask])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_rounding_is_right_on_average(backend: Backend, dtype: torch.dtype) -> None:
    """400 seeds: every result is a neighbour of the exact sum, their mean is the sum, and neighbouring seeds and places
    are unrelated."""
    rows, n, device = 400, 300, backend.device
    generator = torch.Generator().manual_seed(5)
    w = (torch.randn(n, generator=generator) * torch.logspace(-8, 2, n)).to(dtype)
    step = torch.randn(n, generator=generator).to(dtype).float() * w.abs().float() * 2.0**-9
    step = step.to(dtype).float()
    hparams = torch.zeros(rows, 1, NUM_HPARAMS, dtype=torch.float64)
    hparams[..., HParam.RHO] = 1.0
    params, backup = torch.zeros(rows, n, dtype=dtype, device=device), w.expand(rows, n).to(device).contiguous()
    grads = [step.to(dtype).expand(rows, n).to(device).contiguous()]
    args = torch.tensor([[0, n, 0, 0]]), hparams.to(device), torch.ones(rows, dtype=torch.float64, device=device), False
    backend.load().perturb_([params], backup, grads, *args, torch.arange(rows, device=device))

    result, exact = params.cpu().double(), w.double() + step.double()
    floor = torch.where(result < exact, result, -torch.inf).amax(0)
    next_larger = torch.where(result > exact, result, torch.inf).amin(0)
    is_between = floor.isfinite() & next_larger.isfinite()
    assert is_between.sum() > n / 2
    unit = (next_larger - floor)[is_between]
    assert ((result[:, is_between] == floor[is_between]) | (result[:, is_between] == next_larger[is_between])).all()
    assert (((result.mean(0) - exact)[is_between]) / unit).abs().max() < 4.5 * 0.5 / rows**0.5
    p = ((exact - floor)[is_between] / unit).clamp(1e-6, 1 - 1e-6)
    noise = ((result[:, is_between] - exact[is_between]) / unit) / (p * (1 - p)).sqrt()
    for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):
        assert (a * b).mean().abs() < 5 / a.numel() ** 0.5 * (a * b).std()


@property_test(cases())
def test_restore_is_bitwise(backend: Backend, case: Case) -> None:
    backup = case.values("backup", torch.float64).to(case.backup_dtype)
    special = torch.tensor([0.0, -0.0, torch.inf, torch.nan]).to(backup)
    backup[:, ::5] = special[torch.arange(backup[:, ::5].shape[1]) % 4]
    memory = Memory(case, backend.device)
    params = memory.operand("params", nan(case, case.dtype), is_written=True)
    placed_backup = memory.field("backup", backup)
    memory.snapshot()
    backend.load().restore_(params, placed_backup, case.table)
    memory.check()
    mask = case.mask()
    restored_weights, expected = memory.read(params)[mask], backup.to(case.dtype)[mask]
    # Rounding a NaN gives a NaN, of whatever payload; torch's foreach copy on CUDA does so in each half precision.
    if case.master or (backend.name, backend.device) == ("foreach", "cuda"):
        assert torch.equal(restored_weights.isnan(), expected.isnan())
        restored_weights, expected = restored_weights.nan_to_num(0.0), expected.nan_to_num(0.0)
    assert same_bits(restored_weights, expected)


class Update:
    """The operands that all updates share, in canonical form, and placed."""

    def __init__(self, case: Case, options: dict[str, bool], device: str) -> None:
        self.case, self.memory, self.device = case, Memory(case, device), device
        params = case.values("params")
        self.values: dict[str, Tensor] = {"params": params, "grads": case.values("grads"), "g1": case.values("g1")}
        # Without a backup the weights are in z; with one z holds a perturbed point, which must not matter.
        self.w = case.values("backup", torch.float64).to(case.backup_dtype) if options["backup"] else params
        self.options: dict[str, object] = {}
        self.options64: dict[str, object] = {}
        if options["q"]:
            self._add("q", case.values("q", case.compute))
        if options["g1"]:
            self.options["g1"] = self.memory.operand("g1", self.values["g1"])
            self.options64["g1"] = [self.values["g1"].double()]
        if options["grad_scale"]:
            self.options["grad_scale"] = torch.tensor([SCALE], device=device)
            self.options64["grad_scale"] = torch.tensor([SCALE])
        self.backup = self.memory.field("backup", self.w, is_written=True) if options["backup"] else None
        self.params = self.memory.operand("params", params, is_written=True)
        self.grads = self.memory.operand("grads", self.values["grads"])
        self.params64 = self.w.to(torch.float64, copy=True)
        self.backup64 = self.w.to(torch.float64, copy=True) if options["backup"] else None

    def _add(self, name: str, values: Tensor) -> None:
        self.options[name] = self.memory.field(name, values)
        self.options64[name] = values.double()

    def state(self, name: str, values: Tensor) -> tuple[Tensor, Tensor]:
        """A field that the op updates, and its float64 twin."""
        return self.memory.field(name, values, is_written=True), values.to(torch.float64, copy=True)

    def args(self, hparams: Tensor) -> tuple:
        return self.params, self.backup, self.grads, self.case.table, hparams.to(self.device)

    def args64(self, hparams: Tensor) -> tuple:
        return [self.params64], self.backup64, [self.values["grads"].double()], self.case.table, hparams

    def check_weights(self, keep: bool) -> None:
        """z as expected; backup too where it is kept up to date, and otherwise bit for bit what it was."""
        self.memory.check()
        mask = self.case.mask()
        close(self.memory.read(self.params)[mask], self.params64[mask])
        if self.backup is not None:
            restored_weights = self.memory.read(self.backup)[mask]
            close(restored_weights, self.params64[mask]) if keep else self.assert_same(restored_weights, self.w[mask])

    @staticmethod
    def assert_same(a: Tensor, b: Tensor) -> None:
        assert same_bits(a, b)


@property_test(cases(), OPTIONS)
def test_update_norm(backend: Backend, case: Case, options: dict[str, bool]) -> None:
    hparams, accumulate = case.hparams(), options["flag"]
    update = Update(case, options, backend.device)
    start = case.sums() if accumulate else torch.full((case.rows,), torch.nan, dtype=torch.float64)
    expected, sumsq = start.clone(), start.to(backend.device)
    reference.update_norm_(expected, *update.args64(hparams), **update.options64, accumulate=accumulate)
    for buffer in update.memory.buffers:
        buffer.writable.zero_()
    update.memory.snapshot()
    backend.load().update_norm_(sumsq, *update.args(hparams), **update.options, accumulate=accumulate)
    update.memory.check()
    close(sumsq, expected, case.compute)


@st.composite
def fields_of(draw: st.DrawFn, rule: str) -> tuple[str, ...]:
    """The fields of the state that a call has: all that are needed, and some of the others."""
    result = rules.find(rule)
    return tuple(name for name in result.state if name not in result.optional or draw(st.booleans()))


def state_of(case: Case, name: str) -> Tensor:
    """Return plausible values of a field: momenta of both signs; sums and means of squares, above the squared mean."""
    values = case.values(name, case.compute) / 4
    return values.square() + 2 if any(part in name for part in ("sq", "sum", "scale")) else values


@pytest.mark.parametrize("rule", rules.RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_update(backend: Backend, rule: str) -> None:
    rule_class = rules.find(rule)

    counts, overflows = st.sampled_from((0.0, 1.0, 7.0, 1000.0)), st.sampled_from((None, False, True))

    @explore(backend, examples=30)
    @given(cases(), OPTIONS, fields_of(rule), st.booleans(), st.booleans(), counts, overflows)
    def holds(
        case: Case,
        options: dict[str, bool],
        fields: tuple[str, ...],
        first: bool,
        clip: bool,
        count: float,
        has_overflow: bool | None,
    ) -> None:
        hparams, keep, sumsq, mask = case.hparams(rule), options["flag"], case.sums(), case.mask()
        hparams[:, 0, HParam.CLIP] = 0.0  # this group is not clipped
        update = Update(case, options, backend.device)
        if options["shift"]:
            shift = case.values("shift", case.compute)
            update.options["shift"], shift = update.memory.share("shift", shift)
            update.options64["shift"] = shift.double()
        options32, options64 = update.options | {"write_master": keep}, update.options64 | {"write_master": keep}
        if clip:
            options32["sumsq_v"], options64["sumsq_v"] = sumsq.to(backend.device), sumsq
        if rule == "sgd":  # the only rule whose first step differs from later steps
            options32["init_state"] = options64["init_state"] = first
        starts = {name: nan(case, case.compute) if rule == "sgd" and first else state_of(case, name) for name in fields}
        state = {name: update.state(name, start) for name, start in starts.items()}
        state32, state64 = ([state[name][i] if name in state else None for name in rule_class.state] for i in (0, 1))
        if rule_class.counter:
            slots = int(case.table[:, 3].max()) + 2 if len(case.table) else 1
            options64["steps"] = torch.full((case.rows, slots), count) + torch.arange(slots)
            options32["steps"] = options64["steps"].to(backend.device, copy=True)
        if has_overflow is not None:
            options32["found_inf"] = torch.tensor([float(has_overflow)], device=backend.device)
            options64["found_inf"] = torch.tensor([float(has_overflow)])
        reference.update_(*update.args64(hparams), rule, state64, **options64)
        update.memory.snapshot()
        backend.load().update_(*update.args(hparams), rule, state32, **options32)
        update.check_weights(keep and not has_overflow)
        if rule_class.counter:
            assert torch.equal(options32["steps"].cpu(), options64["steps"])
        for name, (field, expected) in state.items():
            values = update.memory.read(field)[mask]
            update.assert_same(values, starts[name][mask]) if has_overflow else close(values, expected[mask])
        if has_overflow:
            update.assert_same(update.memory.read(update.params)[mask], update.w.to(case.dtype)[mask])

    holds()
