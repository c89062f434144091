"""The table of trainings that `tests/optim/test_contracts.py` runs every contract over: variant x base x dtype x
options."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fastsam import SAM, FusedSAM
from tests.helpers.sam_oracle import copies
from tests.helpers.variant_cases import BASES, CASES, ONE_PASS, RHO, Training, make_fused, problem

VARIANTS: dict[str, SAM] = {name: sam for name, (sam, _) in ONE_PASS.items()}
VARIANTS |= {"sam": SAM(RHO), "asam": SAM(RHO, True, 0.1), "asam, every third": SAM(RHO, True, interval=3)}
VARIANTS |= {name: case.sam for name, case in CASES.items()}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float16)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "exclusive": {"assume_no_alias": True},
    "in backward": {"assume_no_alias": True, "optimizer_in_backward": True},
    "reference": {"backend": "reference"},
    "stochastic": {"stochastic_rounding": True},
    "foreach": {"backend": "foreach"},
}


class Spec(NamedTuple):
    variant: str
    base: str
    dtype: torch.dtype
    options: str

    @property
    def one_pass(self) -> bool:
        return self.variant in ONE_PASS

    @property
    def backend(self) -> str:
        return OPTIONS[self.options].get("backend", "auto")

    @property
    def has_kernels(self) -> bool:
        """True if the kernels make the base optimizer's step."""
        return self.base not in ("nadam", "amsgrad")

    @property
    def valid(self) -> bool:
        """True if FusedSAM accepts the combination (`tests/optim/test_refusals.py` has the refusals)."""
        if self.options == "in backward":
            return self.variant in ("sam", "asam", "lesam") and self.has_kernels
        if self.dtype is torch.float16 and not self.has_kernels:
            return False  # torch's epsilon of 1e-8 is 0 in float16: it divides 0 by 0
        bases = CASES[self.variant].bases if self.variant in CASES else BASES
        has_base = self.base in (("sgd", "adamw") if self.variant == "msam" else bases)
        return has_base and not (self.one_pass and self.options == "exclusive")

    def make(self, steps: int = 0, **more: Any) -> Training:
        """Return the training after `steps` steps."""
        return make_fused(
            VARIANTS[self.variant], self.base, steps, dtype=self.dtype, **{**OPTIONS[self.options], **more}
        )


def _specs() -> list[Any]:
    """Return every variant with every base, and the other axes in turn. `make test` runs one in six, and three more."""
    usual = [Spec("sam", "sgd", torch.float32, "plain")]
    usual += [Spec(variant, "adamw", torch.float64, "plain") for variant in ("gsam", "wsam")]
    params: list[Any] = [pytest.param(spec, id="-".join(map(str, spec))) for spec in usual]
    numbers = itertools.count(), itertools.count()
    for (i, variant), (j, base) in itertools.product(enumerate(VARIANTS), enumerate(BASES)):
        is_slow = (i + j) % 6 > 0
        number = next(numbers[is_slow])
        spec = Spec(variant, base, DTYPES[number % len(DTYPES)], "in backward")
        if (is_slow and number % 2) or not spec.valid:
            spec = spec._replace(options=list(OPTIONS)[number % len(OPTIONS)])
        spec = spec if spec.valid else spec._replace(options="plain")
        spec = spec if spec.valid else spec._replace(dtype=torch.float32)
        if spec.valid and spec not in usual:
            params.append(pytest.param(spec, id="-".join(map(str, spec)), marks=[pytest.mark.slow] if is_slow else []))
    return params


SPECS = _specs()
every_training = pytest.mark.parametrize("spec", SPECS)


def state(opt: FusedSAM) -> list[Tensor]:
    entries = opt.state_dict()["state"]
    return [v for i in sorted(entries) for _, v in sorted(entries[i].items()) if isinstance(v, Tensor)]


def outcome(training: Training) -> list[Tensor]:
    """Return copies of the weights and the state."""
    return [*copies(training.params), *state(training.opt)]


def awkward(params: list[nn.Parameter]) -> None:
    """Change the memory of parameters: transposed, not aligned, with gaps."""
    first, second, third = (p.data for p in params)
    params[0].data = first.t().contiguous().t()
    params[1].data = torch.cat([second.new_zeros(3), second])[3:]
    room = third.new_full((*third.shape[:-1], 2 * third.shape[-1]), torch.nan)
    params[2].data = room[..., : third.shape[-1]].copy_(third)


def loss_of(training: Training, t: int) -> Tensor:
    return problem()[1](training.params, t)


def by_hand(training: Training, t: int, zero_grad: bool = True, spoil: Callable[[int], None] | None = None) -> None:
    """Take a step in halves. `spoil` is called with the number of each pass after its backward pass."""
    training.opt.zero_grad()
    training.backward(t)
    if training.opt.perturbs:
        spoil and spoil(0)
        training.opt.first_step(zero_grad)
        loss_of(training, t).backward() if zero_grad else training.backward(t)
    spoil and spoil(1)
    training.opt.second_step(zero_grad)
