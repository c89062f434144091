"""The baselines without a federation: SGD, and SAM (Foret, Kleiner, Mobahi and Neyshabur, "Sharpness-Aware Minimization
for Efficiently Improving Generalization", ICLR 2021), on the data of all clients together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastsam.fed.algorithms.fedavg import FedAvg
from fastsam.fed.algorithms.fedsam import FedSAM


@dataclass(frozen=True)
class Centralised_SGD(FedAvg):
    """SGD on the pooled data, with the samples, batches and learning rates that a federated run has (see
    `fastsam.fed.loop.pooled_data`).

    Nothing is sent. State: w. One backward pass a step.
    """

    download_vectors: ClassVar[float] = 0
    upload_vectors: ClassVar[float] = 0
    pools_data: ClassVar[bool] = True


@dataclass(frozen=True)
class Centralised_SAM(FedSAM):
    """SAM on the pooled data, like `Centralised_SGD`; rho, adaptive and eta as in FedSAM.

    Nothing is sent. State: w. Two backward passes a step.
    """

    download_vectors: ClassVar[float] = 0
    upload_vectors: ClassVar[float] = 0
    pools_data: ClassVar[bool] = True
