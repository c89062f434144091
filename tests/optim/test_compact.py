"""`FusedSAM(master="compact")`: what float32 masters would give, from bfloat16 weights and 16 bits of correction."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import GSAM, MSAM, SAM, FusedSAM
from fastsam.backends import Backend
from fastsam.optim import compact
from fastsam.optim.variants import LESAM
from tests.helpers.sam_cases import HALF, SHAPES, Model, first_half, halves, second_half
from tests.helpers.sam_oracle import copies, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory", "short_stretches")
F32, SGD = torch.float32, torch.optim.SGD
MOMENTA = pytest.mark.parametrize("momentum_dtype", [F32, HALF], ids=["float32", "bfloat16"])


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors, which are quick to test with, are several stretches too."""
    monkeypatch.setattr(compact, "FOR_A_THREAD", 1024)


def built(params: Any, momentum_dtype: torch.dtype | None = None, **options: Any) -> FusedSAM:
    settings = {"lr": 0.1, "momentum": 0.9, "rho": 0.3, **options}
    return FusedSAM(params, SGD, master="compact", momentum_dtype=momentum_dtype, **settings)


def masters(opt: FusedSAM) -> list[Tensor]:
    return [entry["master"] for entry in opt.state_dict()["state"].values()]


# --- the split ---


def split(w: Tensor, z: Tensor) -> Tensor:
    """The corrections, int16."""
    low = torch.empty_like(w, dtype=torch.int16)
    for call in compact.splitting(low, w.clone(), z, torch.empty_like(w)):
        call()
    return low


def joined(z: Tensor, low: Tensor) -> Tensor:
    w = torch.empty_like(low, dtype=F32)
    for call in compact.joining(w, z, low):
        call()
    return w


def without_ties(w: Tensor) -> Tensor:
    """What compact masters hold of float32 numbers: of the ties between bfloat16 neighbours, those that round to the
    one farther from zero."""
    bits = w.view(torch.int32)
    inner_is_even = ((bits >> 16) & 1) == 0
    tie = ((bits & 0xFFFF) == 0x8000) & inner_is_even & w.isfinite()
    return (bits - tie.to(torch.int32)).view(F32)


def test_every_float32_number_but_a_tie_comes_back() -> None:
    """All low halves beside upper halves of every kind: zeros, subnormal, even and odd, powers of two, the largest, and
    those of inf and NaN."""
    upper = torch.tensor([0, 1, 2, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7FBF, 0x7FC0, 0x7FFF])
    upper = torch.cat([upper, upper - 0x8000])
    w = (upper[:, None] * 65536 + torch.arange(65536)).to(torch.int32).view(F32).flatten()
    z = w.to(HALF)
    back = joined(z, split(w, z))
    number = ~w.isnan()
    assert same_bits([back[number]], [without_ties(w)[number]])
    assert bool(back[~number].isnan().all()) and same_bits([back.to(HALF)[number]], [z[number]])
    changed = (back[number] != w[number]) & w[number].isfinite()
    assert int(changed.sum()) == 10  # the ties of the even ones: 0, 2, 0x80, 0x3F80, 0x7F7E, and their negatives


def test_any_weight_that_somebody_writes_is_kept() -> None:
    """To half of its last place, whatever the correction beside it says; zeros, above all, are no NaN."""
    written = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-133, 1e-30, 3.0, -2.5]).to(HALF)
    low = torch.cat([torch.arange(-(2**15), 2**15, 77), torch.tensor([-1, 0, 1, 2**15 - 1])]).to(torch.int16)
    for z in written:
        beside = low.clone()
        compact.settle_(beside, z.expand_as(low).contiguous())
        w = joined(z.expand_as(low).contiguous(), beside)
        near = w.to(HALF)
        assert bool(w.isfinite().all())
        assert bool(((near == z) | (beside == -(2**15))).all())  # there half a place away, a tie
        settled = (z == 0) & (low < 0)
        assert torch.equal(beside[~settled], low[~settled]) and bool((beside[settled] == 0).all())


# --- a step is that of float32 masters ---


def full(params: Any, **options: Any) -> FusedSAM:
    return FusedSAM(params, SGD, **{"lr": 0.1, "momentum": 0.9, "rho": 0.3, **options})


def shorten_(opt: FusedSAM, momentum_dtype: torch.dtype = F32) -> int:
    """Makes full masters and float32 momenta what compact ones hold after a step; the number of ties."""
    held = opt._engine.buckets[0].origin
    ties = int((without_ties(held) != held).sum())
    held.copy_(without_ties(held))
    for entry in opt.state.values():
        if "momentum_buffer" in entry:
            entry["momentum_buffer"].copy_(entry["momentum_buffer"].to(momentum_dtype))
    return ties


OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {},
    "nesterov": {"nesterov": True, "weight_decay": 0.1},
    "dampening": {"dampening": 0.3, "maximize": True},
    "none": {"momentum": 0.0},
}


@MOMENTA
@pytest.mark.parametrize("name", OPTIONS)
def test_bits_are_those_of_full_masters(name: str, momentum_dtype: torch.dtype, backend: Backend) -> None:
    """But for ties, and momenta in bfloat16 are rounded to nearest once a step; with parameters that have no gradient
    in one pass or the other."""
    options = {"backend": backend.name, **OPTIONS[name]}
    model, other = (make_parameters([*SHAPES, (33, 65)], HALF, backend.device) for _ in range(2))
    opt, twin = built(model, momentum_dtype, **options), full(other, **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for number, half in enumerate(("first_step", "second_step")):
            for i, (p, q) in enumerate(zip(model, other, strict=True)):
                g = torch.randn(p.shape, generator=generator).to(p.device, HALF)
                absent = step and i == (step + number) % len(model)
                p.grad, q.grad = (None, None) if absent else (g, g.clone())
            getattr(opt, half)()
            getattr(twin, half)()
            if number:
                shorten_(twin, momentum_dtype)
            assert same_bits(model, other), (step, half)
    assert same_bits(masters(opt), masters(twin))
    for p, q in zip(model, other, strict=True):
        if "momentum_buffer" in twin.state.get(q, {}):
            mine = opt.state[p]["momentum_buffer"]
            assert mine.dtype == momentum_dtype and torch.equal(mine.float(), twin.state[q]["momentum_buffer"])


def test_ties_become_their_neighbour_towards_zero(backend: Backend) -> None:
    """Numbers of few digits make many."""
    model, other = ([nn.Parameter(torch.arange(-128.0, 128).to(HALF, copy=True).to(backend.device))] for _ in range(2))
    options = {"lr": 0.125, "momentum": 0.0, "rho": 0.0, "backend": backend.name}
    opt, twin, ties = built(model, **options), full(other, **options), 0
    for step in range(8):
        for half in ("first_step", "second_step"):
            for p in (model[0], other[0]):
                p.grad = torch.full_like(p, 1.0 + step % 3)
            getattr(opt, half)()
            getattr(twin, half)()
        ties += shorten_(twin)
        assert same_bits(model, other) and same_bits(masters(opt), masters(twin))
    assert ties > 20


def test_bfloat16_momenta_stay_near_those_of_float64() -> None:
    """A rounding of 2^-8 a step, of which momentum 0.9 remembers ten: 2^-8/(1 - 0.9) at most, and by chance a fifth of
    that."""
    params = make_parameters([(64, 64)], HALF)
    opt = built(params, HALF)
    exact, largest = torch.zeros(64, 64, dtype=torch.float64), torch.zeros(64, 64, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    for _ in range(60):
        for half in (opt.first_step, opt.second_step):
            params[0].grad = torch.randn(64, 64, generator=generator).to(HALF)
            half()
        exact = 0.9 * exact + params[0].grad.double()
        largest = torch.maximum(largest, exact.abs())
    error = (opt.state[params[0]]["momentum_buffer"].double() - exact).abs() / largest
    assert 2.0**-10 < float(error.max()) <= 1.02 * 2.0**-8 / (1 - 0.9)
    assert float(error.mean()) < 0.2 * 2.0**-8 / (1 - 0.9)


@pytest.mark.parametrize("kind", ["channels-last", "gaps", "two groups"])
def test_parameters_of_every_order(kind: str, backend: Backend) -> None:
    found = []
    for compactly in (True, False):
        params = Model(HALF, backend.device).params
        if kind == "gaps":
            wide = torch.randn(20, 90, generator=torch.Generator().manual_seed(3)).to(backend.device, HALF)
            params.append(nn.Parameter(wide[:, ::2]))
        groups = [{"params": params[:1], "lr": 0.3}, {"params": params[1:]}] if kind == "two groups" else params
        opt = (built if compactly else full)(groups, backend=backend.name)
        for step in range(2):
            halves(opt, params, step)
        found.append(copies(params))
    assert same_bits(*found)


# --- steps that are no steps ---


def test_restoring_is_bit_for_bit(backend: Backend) -> None:
    model = Model(HALF, backend.device)
    opt = built(model.params, backend=backend.name)
    halves(opt, model.params)
    before, held = copies(model.params), masters(opt)
    first_half(opt, model.params, 1)
    assert not same_bits(before, model.params) and same_bits(masters(opt), held)
    opt.restore()
    assert same_bits(before, model.params) and same_bits(masters(opt), held)
    with opt.perturbed():
        pass
    assert same_bits(before, model.params)


@MOMENTA
def test_a_gradient_that_is_not_finite_changes_nothing(momentum_dtype: torch.dtype, backend: Backend) -> None:
    model = Model(HALF, backend.device)
    opt = built(model.params, momentum_dtype, backend=backend.name, check_finite=True)
    halves(opt, model.params)
    before, state = copies(model.params), copy.deepcopy(opt.state_dict()["state"])
    first_half(opt, model.params, 1)
    for p in model.params:
        p.grad = torch.full_like(p, torch.inf)
    opt.second_step()
    assert same_bits(before, model.params)
    assert all(torch.equal(state[i][n], v) for i, e in opt.state_dict()["state"].items() for n, v in e.items())


def test_weights_that_somebody_writes(backend: Backend) -> None:
    """Pruned ones, here past the version counter, are zeros and no NaN; the others go on from what was written."""
    model = Model(HALF, backend.device)
    opt = built(model.params, backend=backend.name, lr=1e-6)
    halves(opt, model.params)
    for p in model.params:
        p.data.mul_(torch.arange(p.numel(), device=p.device).reshape(p.shape) % 2)
    before = copies(model.params)
    halves(opt, model.params, 1)
    for b, p in zip(before, model.params, strict=True):
        assert bool(((p - b).abs() <= b.abs() * 2.0**-7 + 1e-4).all())


# --- saving ---


@MOMENTA
@pytest.mark.parametrize("midway", [False, True], ids=["between steps", "between passes"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_copies_go_on_alike(how: str, midway: bool, momentum_dtype: torch.dtype) -> None:
    model = Model(HALF)
    opt = built(model.params, momentum_dtype)
    halves(opt, model.params)
    if midway:
        first_half(opt, model.params, 1)
    if how == "state_dict":
        twin = copy.deepcopy(model)
        other = built(twin.params, momentum_dtype)
        other.load_state_dict(opt.state_dict())
    else:
        twin, other = copy.deepcopy((model, opt)) if how == "deepcopy" else pickle.loads(pickle.dumps((model, opt)))
    for m, o in ((model, opt), (twin, other)):
        if midway:
            second_half(m, o, 1)
        halves(o, m.params, 2)
    assert same_bits(model.params, twin.params) and same_bits(masters(opt), masters(other))
    assert other.state[twin.params[0]]["momentum_buffer"].dtype == momentum_dtype


@pytest.mark.parametrize("midway", [False, True], ids=["between steps", "between passes"])
def test_full_masters_are_taken_over_and_given_back(midway: bool) -> None:
    """The same numbers in both: a state dict has them in float32."""
    makes: list[Callable[[list[nn.Parameter]], FusedSAM]] = [full, built, full]
    alone = Model(HALF)
    model, opt, undisturbed = Model(HALF), None, full(alone.params)
    for step, make in enumerate(makes):
        other = make(model.params)
        if opt is not None:
            other.load_state_dict(opt.state_dict())
        opt = other
        for m, o in ((model, opt), (alone, undisturbed)):
            if midway and step:
                second_half(m, o, step)
            halves(o, m.params, 10 + step)
            if o is undisturbed or make is full:
                shorten_(o)
            if midway:
                first_half(o, m.params, step + 1)
        assert same_bits(alone.params, model.params) and same_bits(masters(undisturbed), masters(opt))


def test_a_loaded_master_of_other_weights_gives_way() -> None:
    """As with full masters: whoever wrote the weights after the state was saved has the last word."""
    model = Model(HALF)
    opt = built(model.params)
    halves(opt, model.params)
    saved = opt.state_dict()
    with torch.no_grad():
        for p in model.params:
            p.add_(1.0)
    other = built(model.params)
    other.load_state_dict(saved)
    first_half(other, model.params, 1)
    other.restore()
    assert same_bits(masters(other), [p.detach().float() for p in model.params])


# --- what it costs, and what it is not for ---


@MOMENTA
def test_bytes_per_parameter(momentum_dtype: torch.dtype) -> None:
    """Between steps 2 for the corrections, and the momentum; 2 more while weights are perturbed."""
    params = [nn.Parameter(torch.randn(64, 256).to(HALF))]
    opt = built(params, momentum_dtype)
    halves(opt, params)
    bucket, count = opt._engine.buckets[0], params[0].numel()
    assert isinstance(bucket, compact.CompactBucket) and bucket._origin is None
    assert bucket.arena.nbytes == count * (2 + momentum_dtype.itemsize)
    assert bucket._scratch.numel() <= 3 * 1024 * torch.get_num_threads()
    first_half(opt, params, 1)
    assert bucket.origin.nbytes == 2 * count


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another name": ({"master": "small"}, "master must be 'full' or 'compact', got 'small'"),
    "another dtype of momenta": ({"momentum_dtype": torch.float16}, "momentum_dtype must be torch.float32 or"),
    "momenta alone": ({"master": "full", "momentum_dtype": HALF}, "momentum_dtype goes with master='compact'"),
    "stochastic rounding": ({"stochastic_rounding": True}, "stochastic_rounding=True"),
    "exclusive": ({"exclusive": True}, "exclusive=True"),
    "adaptive": ({"adaptive": True}, "adaptive=True"),
    "every": ({"sam": SAM(every=2)}, "every=2"),
    "a variant": ({"sam": GSAM(rho=0.1)}, "GSAM"),
    "a radius": ({"sam": SAM(radius=LESAM(sigma=0.1))}, "LESAM"),
    "one pass": ({"sam": MSAM()}, "MSAM"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_serve(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        FusedSAM(make_parameters(SHAPES, HALF), SGD, **{"lr": 0.1, "momentum": 0.9, "master": "compact", **options})


@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.float16])
def test_other_parameters_are_refused(dtype: torch.dtype) -> None:
    params = make_parameters(SHAPES, HALF)
    with pytest.raises(ValueError, match=f"serves bfloat16, and parameter 5 is {dtype}"):
        built([*params, nn.Parameter(torch.zeros(3, dtype=dtype))])


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.Rprop])
def test_other_bases_are_refused(base: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(ValueError, match=f"serves torch.optim.SGD, got {base.__name__}"):
        FusedSAM(make_parameters(SHAPES, HALF), base, lr=0.1, master="compact")


def test_what_changes_later_is_refused_before_anything_is_written() -> None:
    model = Model(HALF)
    opt = built(model.params)
    halves(opt, model.params)
    before = copies(model.params)
    opt.param_groups[0]["adaptive"] = True
    with pytest.raises(ValueError, match="adaptive=True"):
        first_half(opt, model.params, 1)
    assert same_bits(before, model.params)
    opt.param_groups[0]["adaptive"] = False
    first_half(opt, model.params, 1)
    model.float()
    with pytest.raises(ValueError, match=r"parameter 0 is torch\.float32"):
        opt.restore()
    assert same_bits([b.float() for b in before], model.params)
