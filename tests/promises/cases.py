"""Every federated algorithm, its twin in `oracle`, and the options of a run under which they are compared."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastsam import fed
from fastsam.fed.algorithms.base import has_loop
from tests.helpers import oracle

# Partial participation, one round with all clients, a client that returns after a pause.
ACTIVE = [[0, 3], [1, 2, 4], [3], [0, 1, 2, 3, 4], [2, 3], [0, 4]]

# name: (algorithm, its hyper-parameters). The twin in `oracle` has the same name and takes the same ones.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("FedAvg", {}),
    "fedadam": ("FedAdam", {"beta1": 0.8, "beta2": 0.95, "tau": 0.02}),
    "fedadam-corrected": ("FedAdam", {"bias_correction": True}),
    "fedadam-start": ("FedAdam", {"tau": 0.02, "V0": 4e-4}),
    "fedadagrad": ("FedAdagrad", {"tau": 0.02}),
    "fedadagrad-momentum": ("FedAdagrad", {"beta1": 0.6, "tau": 0.02, "V0": 4e-4}),
    "fedyogi": ("FedYogi", {"beta1": 0.8, "beta2": 0.9, "tau": 0.02, "V0": 1e-4}),
    "fedavgm": ("FedAvgM", {"beta": 0.6}),
    "fednova": ("FedNova", {}),
    "fedexp": ("FedExP", {"eps": 1e-6}),
    "fedexp-last": ("FedExP", {"eps": 1e-5, "average": False}),
    "fedprox": ("FedProx", {"phi": 0.5}),
    "fedsam": ("FedSAM", {"rho": 0.3}),
    "fedsam-schedule": ("FedSAM", {"rho": "linear(0.3, 0.1, 3)"}),
    "fedsam-asam": ("FedSAM", {"rho": 0.3, "adaptive": True, "eta": 0.01}),
    "fedsam-asam-eta0": ("FedSAM", {"rho": 0.2, "adaptive": True}),
    "fedgsam": ("FedGSAM", {"rho": 0.3, "alpha": 0.4}),
    "fedgsam-schedule": ("FedGSAM", {"rho": 0.3, "alpha": 0.4, "rho_min": 0.1}),
    "fedgsam-lr-min": ("FedGSAM", {"rho": 0.3, "alpha": 0.4, "rho_min": 0.1, "lr_min": 0.01}),
    "fedlesam": ("FedLESAM", {"rho": 0.2}),
    "fedlesam-none": ("FedLESAM", {"rho": 0.2, "initial_perturbation": "none"}),
    "fedlesam-last-round": ("FedLESAM", {"rho": 0.2, "reference": "last_round"}),
    "fedlesam-last-round-none": ("FedLESAM", {"rho": 0.2, "initial_perturbation": "none", "reference": "last_round"}),
    "fedlesam-s": ("FedLESAM_S", {"rho": 0.2, "control_scale": 0.6}),
    "fedlesam-d": ("FedLESAM_D", {"rho": 0.2, "phi": 0.3}),
    "scaffold": ("SCAFFOLD", {}),
    "fedgamma": ("FedGAMMA", {"rho": 0.2}),
    "fedcm": ("FedCM", {"alpha": 0.3}),
    "fedcm-epochs": ("FedCM", {"alpha": 0.3, "momentum_K": "epochs"}),
    "mofedsam": ("MoFedSAM", {"rho": 0.2, "beta": 0.3}),
    "mofedsam-epochs": ("MoFedSAM", {"rho": 0.2, "beta": 0.3, "momentum_K": "epochs"}),
    "mimelite": ("MimeLite", {"beta": 0.3}),
    "mimelite-heavy": ("MimeLite", {"beta": 0.3, "momentum_form": "heavy_ball"}),
    "feddyn": ("FedDyn", {"phi": 0.3}),
    "feddyn-decay": ("FedDyn", {"phi": 0.3, "phi_decay": 0.7}),
    "fedsmoo": ("FedSMOO", {"rho": 0.2, "phi": 0.3}),
    "fedsmoo-alpha": ("FedSMOO", {"rho": 0.2, "phi": 0.3, "alpha": 2.0}),
    "fedsmoo-mu-active": ("FedSMOO", {"rho": 0.2, "phi": 0.3, "s_rule": "mu_active"}),
    "fedsmoo-mu-all": ("FedSMOO", {"rho": 0.2, "phi": 0.3, "s_rule": "mu_all"}),
    "fedsmoo-alone": ("FedSMOO", {"rho": 0.2, "phi": 0.3, "alpha": 0.7, "dyn": False}),
    "fedsmoo-schedule": ("FedSMOO", {"rho": "0.3/sqrt(round)", "phi": 0.3, "phi_decay": 0.7}),
    "fedgloss": ("FedGloSS", {"rho": 0.3, "rho_local": 0.2, "phi": 0.3}),
    "fedgloss-sgd": ("FedGloSS", {"rho": "linear(0.1, 0.3, 3)", "rho_local": 0.0, "phi": 0.3}),
    "fedgmt": ("FedGMT", {"gamma": 0.7, "alpha": 0.6, "tau": 2.0, "phi": 0.3}),
    "fedntd": ("FedNTD", {"beta": 0.8, "tau": 2.0}),
    "fedsol": ("FedSOL", {"rho": 0.4, "tau": 2.0}),
    "moon": ("MOON", {"mu": 0.8, "tau": 0.4}),
    "moon-features": ("MOON", {"mu": 2.0, "features": "0"}),
    "fedswa": ("FedSWA", {"rho": 0.2, "alpha": 1.3}),
    "fedmoswa": ("FedMoSWA", {"rho": 0.3, "alpha": 1.2, "gamma": 0.6}),
    "fednsam": ("FedNSAM", {"rho": 0.2, "gamma": 0.6}),
    "fednsam-momentum": ("FedNSAM", {"rho": 0.2, "gamma": 0.6, "perturb": "momentum"}),
    "fedwmsam": ("FedWMSAM", {"rho": 0.2, "alpha": 0.3, "alpha_rate": 0.2}),
    "fedtoga": ("FedTOGA", {"rho": 0.2, "kappa": 0.7, "phi": 0.3, "beta": 0.4}),
    "fedgf": ("FedGF", {"rho": 0.2, "rho_g": 0.3, "threshold": 0.15}),
    "fedgf-window": ("FedGF", {"rho": 0.2, "rho_g": 0.3, "threshold": 0.15, "window": 2}),
    "fedscam": ("FedSCAM", {"rho": 0.6, "alpha": 0.7, "gamma": 0.9, "beta": 0.6, "kappa": 0.8}),
    "fedscam-turned": ("FedSCAM", {"rho": 0.6, "beta": 2.0, "kappa": 3.0, "pilots": 1}),
    "fedspeed": ("FedSpeed", {"rho": 0.2, "alpha": 0.6, "phi": 0.3}),
    "fedrobust": ("FedRobust", {"lam": 0.3, "eta_2": 0.2, "form": "full"}),
    "fedrobust-default": ("FedRobust", {}),
    "fedrobust-diag": ("FedRobust", {"lam": 0.3, "ascent_steps": 3, "form": "diag"}),
    "fedrobust-radius": ("FedRobust", {"ascent_steps": 2, "eta_2": 0.5, "form": "full", "radius": (0.2, 0.1)}),
}
NOT_STACKED = tuple(name for name, cls in fed.algorithms.registry.items() if has_loop(cls()))
# Options whose names or values differ in the twin.
SCHEDULES: dict[str, dict[str, Any]] = {
    "fedsam-schedule": {"rho": lambda t: (0.3, 0.2, 0.1)[min(t, 2)]},
    "fedgloss-sgd": {"rho": lambda t: (0.1, 0.2, 0.3)[min(t, 2)]},
    "fedsmoo-schedule": {"rho": lambda t: 0.3 / math.sqrt(t + 1)},
}
# float64: rounding only. float32: the same, amplified by the curvature along the path.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

OPTIONS = {
    "plain": oracle.Options(),
    "decay": oracle.Options(weight_decay=0.05, server_lr=0.7, shuffle=True, seed=3),
    "momentum": oracle.Options(momentum=0.9, weight_decay=0.01, weighting="samples", lr=0.05),
    "clip-idle": oracle.Options(clip=1e3, weight_decay=0.05),
    "clip-active": oracle.Options(clip=0.05, weight_decay=0.05, momentum=0.5),
    "clip-linear": oracle.Options(clip=0.05, scope="linear", weight_decay=0.05, weighting="samples"),
    "long": oracle.Options(rounds=3, epochs=10, lr=0.03, weight_decay=0.01),  # 50 steps of the largest client
}


def make_algorithm(method: str) -> fed.Algorithm:
    """Return the algorithm of a case."""
    name, parameters = METHODS[method]
    return getattr(fed, name)(**parameters)


def make_oracle(method: str) -> Any:
    """Return the twin of a case's algorithm."""
    name, parameters = METHODS[method]
    return getattr(oracle, name)(**{**parameters, **SCHEDULES.get(method, {})})


def options_of(method: str, options: str) -> oracle.Options:
    """Return the options of a case. A server as FedDyn's has no learning rate."""
    no_server_lr = isinstance(make_oracle(method), (oracle.dynamic.Dynamic, oracle.FedExP))
    return replace(OPTIONS[options], server_lr=1.0) if no_server_lr else OPTIONS[options]


def run_replayed(
    model: nn.Module,
    clients: Sequence[tuple[torch.Tensor, torch.Tensor]],
    algorithm: Any,
    options: oracle.Options = OPTIONS["plain"],
    active: Sequence[Sequence[int]] = ACTIVE,
    **more_options: Any,
) -> fed.Result:
    """Run fastsam with the options and the participation of the oracle's run."""
    keywords = {"executor": "sequential", **options.keywords(), **more_options}
    return fed.run(model, clients, algorithm, sampler=lambda t, generator: active[t], **keywords)


@functools.cache
def run_oracle(method: str, options: str, dtype: torch.dtype) -> torch.nn.Module:
    """Return the oracle's model for a case on `smooth_model`."""
    model, clients = oracle.smooth_model(dtype), oracle.ragged_clients(dtype)
    return oracle.run(model, clients, make_oracle(method), options_of(method, options), ACTIVE)
