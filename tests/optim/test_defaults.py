"""torch's default device and dtype are for tensors that a user makes without naming them; a step does not depend on
them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import FusedSAM
from fastsam.backends import Backend
from tests.helpers.crosses import one_in
from tests.helpers.sam_cases import BASES
from tests.helpers.sam_oracle import backward, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trained(name: str, dtype: torch.dtype, backend: Backend, surroundings: Any) -> list[nn.Parameter]:
    """Everything that makes tensors: buffers, state, tables of some of the parameters, and what a state dict brings."""
    base, options = BASES[name]
    params = make_parameters([(5, 3), (8,), ()], dtype, backend.device)
    params.append(nn.Parameter(torch.ones(4, 6, dtype=dtype, device=backend.device)[:, :3]))  # with gaps
    with surroundings():
        opt = FusedSAM(params, base, rho=0.2, backend=backend.name, exclusive=True, **options)
    for step in range(4):
        for half in (opt.first_step, opt.second_step):
            backward(params, step)
            if step == 2:
                params[1].grad = None
            with surroundings():
                half()
        if step == 1:
            saved = copy.deepcopy(opt.state_dict())
            for entry in saved["state"].values():
                if "step" in entry:
                    entry["step"] = float(entry["step"])  # as old versions of torch had it
            with surroundings():
                opt.load_state_dict(saved)
    return params


@pytest.mark.parametrize(
    ("dtype", "name", "default"),
    one_in(2, [torch.float32, torch.bfloat16], BASES, ["meta", torch.float64, torch.float16]),
    ids=str,
)
def test_a_step_does_not_depend_on_defaults(default: Any, name: str, dtype: torch.dtype, backend: Backend) -> None:
    """The device "meta" stands for a GPU: tensors that get there by default have no values on the CPU."""
    if default == "meta" and name == "rmsprop":
        pytest.skip("torch's RMSprop makes its own counters on the default device")

    def surroundings() -> Any:
        return torch.device("meta") if default == "meta" else default_dtype(default)

    assert same_bits(trained(name, dtype, backend, surroundings), trained(name, dtype, backend, nullcontext))
