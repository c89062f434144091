"""Parameter groups, which `FusedSAM` shares with its base optimizer: one more group, checks, a description."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fastsam import ops
from fastsam.backends import select
from fastsam.optim import parameters
from fastsam.optim.engine import Engine
from fastsam.optim.hparams import OWN_OPTIONS, check_group
from fastsam.optim.parameters import parameters_of
from fastsam.optim.sharded import check_options, is_dtensor
from fastsam.optim.variant_step import check_base


class ParamGroupsMixin(Optimizer):
    """The parameter groups of an optimizer whose steps an engine makes."""

    base_optimizer: Optimizer
    _engine: Engine

    def _share_groups(self) -> None:
        """Give the base optimizer the groups, state and hooks of this one, also after they were replaced."""
        base = self.base_optimizer
        if (
            base.param_groups is self.param_groups
            and base.state is self.state
            and base._optimizer_step_pre_hooks is self._optimizer_step_pre_hooks
            and base._optimizer_step_post_hooks is self._optimizer_step_post_hooks
        ):
            return  # torch.compile cannot write them with torch 2.11
        base.param_groups, base.state = self.param_groups, self.state
        # A hook on either optimizer fires once per step.
        base._optimizer_step_pre_hooks = self._optimizer_step_pre_hooks
        base._optimizer_step_post_hooks = self._optimizer_step_post_hooks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as for any torch optimizer; the state of the other parameters stays. Raises as the
        constructor does, and then adds nothing."""
        if isinstance(param_group, dict) and not isinstance(param_group.get("params"), (Tensor, set, type(None))):
            param_group["params"] = list(param_group["params"])
            parameters.check_no_duplicates(param_group["params"])
        if "_engine" in self.__dict__:
            self._add_to_both(param_group)
        else:
            super().add_param_group(param_group)

    def _add_to_both(self, param_group: dict[str, Any]) -> None:
        """Add a group to both optimizers, or raise and add nothing."""
        if isinstance(param_group, dict):
            for name in OWN_OPTIONS:
                param_group.setdefault(name, self.defaults[name])
        self._share_groups()
        self.base_optimizer.add_param_group(param_group)
        try:
            check_group(param_group, len(self.param_groups) - 1)
            check_base(self._engine.variant, self.base_optimizer, self.param_groups)
            self._check_parameters()
        except BaseException:
            self.param_groups.pop()
            raise

    def _check_parameters(self) -> None:
        """Raise if the parameters cannot be optimized."""
        params, engine = parameters_of(self.param_groups), self._engine
        parameters.check(params)
        if any(map(is_dtensor, params)):
            if engine.variant.norm_degree != 2:
                raise ValueError(
                    f"{type(engine.variant).__name__} with DTensor parameters is not supported, because its norm is "
                    f"not reduced between ranks. Take a variant with an L2 norm"
                )
            check_options(engine.stochastic_rounding, engine.exclusive)
        for dtype in {p.dtype for p in params}:
            ops.bind(engine.backend, params[0].device, dtype)

    def __repr__(self) -> str:
        variant, backend = self._engine.variant, self._engine.backend
        options = [f"{f.name}={getattr(variant, f.name)!r}" for f in fields(variant) if f.name not in OWN_OPTIONS]
        names = {select(backend, p.device, p.dtype).name for p in parameters_of(self.param_groups)}
        head = {
            "base optimizer": type(self.base_optimizer).__name__,
            "variant": f"{type(variant).__name__}({', '.join(options)})",
            "backend": ", ".join(sorted(names)),
        }
        lines = "".join(f"\n{name}: {value}" for name, value in head.items())
        return super().__repr__().replace(" (", f" ({lines}\n", 1)
