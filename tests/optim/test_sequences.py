"""Random sequences of user calls, compared with the oracle.

They have steps of every style, absent gradients, saving, copying, moving, new groups and new options.
"""

import copy
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from fastsam import FusedSAM
from fastsam.optim import storage_swap
from tests.helpers.sam_oracle import Oracle, backward, copies, gradients, make_parameters, same_bits

BASES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.05, "eps": 1e-3}),
    (torch.optim.Adam, {"lr": 0.05, "eps": 1e-3, "amsgrad": True}),
    (torch.optim.RMSprop, {"lr": 0.02, "eps": 1e-3, "momentum": 0.5}),
]
MIN_MEAN_NUMEL = storage_swap.MIN_MEAN_NUMEL_CPU
absences = st.sets(st.integers(0, 5))


class Training(RuleBasedStateMachine):
    """One model, stepped by FusedSAM and by the oracle, which is given the same gradients."""

    @initialize(
        base=st.sampled_from(BASES),
        adaptive=st.booleans(),
        backend=st.sampled_from(["auto", "foreach", "reference"]),
        assume_no_alias=st.booleans(),
    )
    def start(self, base: tuple[Any, dict[str, Any]], adaptive: bool, backend: str, assume_no_alias: bool) -> None:
        storage_swap.MIN_MEAN_NUMEL_CPU = 0  # small tensors too
        self.base, self.options = base[0], {**base[1], "rho": 0.3, "adaptive": adaptive}
        self.actual = {"backend": backend, "assume_no_alias": assume_no_alias}
        self.time, self.is_perturbed = 0, False
        self.params = make_parameters([(5, 3), (8,), (), (2, 3, 2, 2)], torch.float64)
        self.params[3].data = self.params[3].data.to(memory_format=torch.channels_last)
        self.opt = FusedSAM(self.params, self.base, **self.actual, **self.options)
        self.oracle = Oracle([{"params": self.params}], self.base, self.options)

    def _gradients(self, absent: set[int]) -> None:
        backward(self.params, self.time)
        for i in absent:
            if i < len(self.params):
                self.params[i].grad = None

    @precondition(lambda self: not self.is_perturbed)
    @rule(absent=absences)
    def first_step(self, absent: set[int]) -> None:
        self._gradients(absent)
        self.oracle.perturb(gradients(self.params))
        self.opt.first_step()
        self.is_perturbed = True

    @precondition(lambda self: self.is_perturbed)
    @rule(absent=absences, through_step=st.booleans())
    def second_step(self, absent: set[int], through_step: bool) -> None:
        self._gradients(absent)
        self.oracle.update(gradients(self.params))
        self.opt.step() if through_step else self.opt.second_step(zero_grad=True)
        self.is_perturbed, self.time = False, self.time + 1

    @precondition(lambda self: self.is_perturbed)
    @rule()
    def restore(self) -> None:
        self.oracle.restore()
        self.opt.restore()
        self.is_perturbed = False

    @precondition(lambda self: not self.is_perturbed)
    @rule(first=absences, second=absences, fails=st.sampled_from([None, None, 1, 2]))
    def step_with_a_closure(self, first: set[int], second: set[int], fails: int | None) -> None:
        calls, old_weights = [], copies(self.params)

        def closure() -> torch.Tensor:
            calls.append(1)
            self._gradients(first if len(calls) == 1 else second)
            (self.oracle.perturb if len(calls) == 1 else self.oracle.set_gradients)(gradients(self.params))
            if len(calls) == fails:
                raise KeyboardInterrupt
            return torch.zeros(())

        try:
            self.opt.step(closure)
            self.oracle.update(gradients(self.params))
            self.time += 1
        except KeyboardInterrupt:
            self.oracle.restore()
            assert same_bits(old_weights, self.params)

    @rule()
    def save_and_load(self) -> None:
        state_dict, weights = self.opt.state_dict(), copies(self.params)
        groups = [{"params": [nn.Parameter(w) for w in weights[:4]]}]
        groups += [{"params": [nn.Parameter(w)]} for w in weights[4:]]
        self.opt = FusedSAM(groups, self.base, **self.actual, **{**self.options, "lr": 9.0})
        self.params = [p for group in groups for p in group["params"]]
        self.opt.load_state_dict(state_dict)

    @rule()
    def copy(self) -> None:
        self.params, self.opt = copy.deepcopy((self.params, self.opt))

    @rule()
    def move(self) -> None:
        for p in self.params:
            p.data = p.data.clone()

    @rule(number=st.integers(0, 3), contiguous=st.booleans())
    def reorder(self, number: int, contiguous: bool) -> None:
        p = self.params[number]
        if p.dim() == 4:
            p.data = p.data.contiguous(memory_format=torch.contiguous_format if contiguous else torch.channels_last)
            p.grad = None

    @rule(name=st.sampled_from(["lr", "rho", "weight_decay"]), value=st.floats(0, 0.5))
    def set_an_option(self, name: str, value: float) -> None:
        self.opt.param_groups[0][name] = value
        (self.oracle.sam[0] if name == "rho" else self.oracle.base.param_groups[0])[name] = value

    @precondition(lambda self: len(self.params) < 6)
    @rule()
    def add_a_group(self) -> None:
        fresh = make_parameters([(7,)], torch.float64, seed=len(self.params))
        twin = nn.Parameter(fresh[0].detach().clone())
        self.params += fresh
        self.opt.add_param_group({"params": fresh, "rho": 0.1, "lr": 0.1})
        self.oracle.base.add_param_group({"params": [twin], "lr": 0.1})
        self.oracle.groups.append([twin])
        self.oracle.sam.append({**self.oracle.sam[0], "rho": 0.1})

    def teardown(self) -> None:
        storage_swap.MIN_MEAN_NUMEL_CPU = MIN_MEAN_NUMEL

    @invariant()
    def the_weights_are_the_oracles(self) -> None:
        for p, q in zip(getattr(self, "params", []), self.oracle.params if hasattr(self, "oracle") else []):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-9, atol=1e-9)


TestTraining = Training.TestCase
TestTraining.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
