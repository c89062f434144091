"""All federated algorithms once more, for tests only: unfused, parameter by parameter, as the papers print them.

Nothing of fastsam computes here. Only public facts of a run are shared with it: the clients of each round, the order of
a client's batches, and the seeds of a model's random numbers (`loop.order`, `loop.attendance`).
"""

from .adamw import FedAdamW
from .averaging import FedMoSWA, FedNSAM, FedSWA
from .control import SCAFFOLD, FedGAMMA, FedLESAM_S
from .dynamic import FedDyn, FedGloSS, FedLESAM_D, FedSMOO, FedSpeed
from .flat import FedGF, FedSCAM, FedTOGA, FedWMSAM
from .loop import Options, attendance, run
from .momentum import FedCM, MimeLite, MoFedSAM
from .plain import FedAdam, FedAvg, FedGSAM, FedLESAM, FedProx, FedSAM
from .problems import (
    difference,
    dropout_model,
    flat_norm,
    movement,
    pooling_model,
    ragged_clients,
    ragged_images,
    smooth_model,
)
from .robust import FedRobust
from .servers import FedAdagrad, FedAvgM, FedExP, FedNova, FedYogi
from .taught import MOON, FedGMT, FedNTD, FedSOL

__all__ = [
    "MOON", "SCAFFOLD", "FedAdagrad", "FedAdam", "FedAdamW", "FedAvg", "FedAvgM", "FedCM", "FedDyn", "FedExP",
    "FedGAMMA", "FedGF", "FedGMT", "FedGSAM", "FedGloSS", "FedLESAM", "FedLESAM_D", "FedLESAM_S", "FedMoSWA",
    "FedNSAM", "FedNTD", "FedNova", "FedProx", "FedRobust", "FedSAM", "FedSCAM", "FedSMOO", "FedSOL", "FedSWA",
    "FedSpeed", "FedTOGA", "FedWMSAM", "FedYogi", "MimeLite", "MoFedSAM", "Options", "attendance",
    "difference", "dropout_model", "flat_norm", "movement", "pooling_model", "ragged_clients", "ragged_images", "run",
    "smooth_model",
]  # fmt: skip
