"""SAM-ON: Mueller, Vlaar, Rolnick and Hein, "Normalization Layers Are All That Sharpness-Aware Minimization Needs",
NeurIPS 2023."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastsam.optim.variants.sam import SAM

LAYERS: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class SAMON(SAM):
    """SAM that perturbs only the parameters of normalisation layers: groups whose rho is not 0, as
    `SAMON.groups(model)` makes them.

        eps = rho * T^2*g1 / (||T*g1|| + 1e-12) over these parameters,   0 elsewhere
        w <- the base optimizer's update of all parameters with g2

    Groups with rho = 0 are left out of the norm (with `SAM` they count), so rho is the length of the perturbation. The
    paper's radii are larger than SAM's. Two gradient passes a step; state: a copy of the weights between them. Bytes
    per float32 parameter that is not perturbed: 20 of SGD with momentum, and 16 for a copy.
    """

    @staticmethod
    def groups(model: nn.Module, layers: tuple[type[nn.Module], ...] = LAYERS) -> list[dict[str, Any]]:
        """Return two parameter groups: parameters of the normalisation layers `layers`, and all others with rho = 0.

        Raises ValueError for a model without such layers.
        """
        norm_params = {
            id(p) for module in model.modules() if isinstance(module, layers) for p in module.parameters(recurse=False)
        }
        params: list[nn.Parameter] = list(model.parameters())
        if not norm_params:
            raise ValueError(
                f"{type(model).__name__} has no parameters in {', '.join(layer.__name__ for layer in layers)}; name "
                "the classes of its normalisation layers: SAMON.groups(model, layers=(MyNorm,))"
            )
        norm_group = {"params": [p for p in params if id(p) in norm_params]}
        other_group = {"params": [p for p in params if id(p) not in norm_params], "rho": 0.0}
        return [norm_group, other_group]

    def perturbs_group(self, group: Mapping[str, Any]) -> bool:
        return isinstance(group["rho"], Tensor) or group["rho"] != 0
