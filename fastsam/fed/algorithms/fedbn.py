"""FedBN: Li, Jiang, Zhang, Kamp and Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
ICLR 2021 (Algorithm 1); https://github.com/med-air/FedBN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fastsam.fed.algorithms.base import Algorithm

LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class FedBN(Algorithm):
    """FedAvg in which the normalisation layers stay with the clients, their parameters and running statistics.

        w <- w + server_lr * mean_i Delta_i     over all parameters outside of normalisation layers

    The paper uses BatchNorm. GroupNorm, InstanceNorm, LayerNorm and RMSNorm layers stay too. A model without such
    layers is refused, as is a run with `buffers="average"` or `"keep"`. For another algorithm use `local_parameters=`
    with these parameters, and `buffers="local"`. Per round and client 1 P down and 1 P up, without these layers;
    state: w, and the layers on every client.
    """

    own_buffers: ClassVar[bool] = True

    def own_parameters(self, model: nn.Module) -> Sequence[str]:
        layers = [(name, m) for name, m in model.named_modules() if isinstance(m, LAYERS)]
        if not layers:
            raise ValueError(
                "FedBN leaves normalisation layers (BatchNorm, GroupNorm, LayerNorm, ...) with the clients, and the "
                "model has none: use FedAvg"
            )
        ids = {id(p) for _, layer in layers for p in layer.parameters(recurse=False)}
        return [name for name, p in model.named_parameters() if id(p) in ids and p.requires_grad]
