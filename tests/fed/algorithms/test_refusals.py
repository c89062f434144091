"""Refusals of the algorithms, with their messages."""

import math

import pytest
import torch
import torch.nn.functional as F

from fastsam import fed
from fastsam.fed.algorithms.schedule import check_scheduled
from fastsam.lab import config
from tests.helpers import oracle
from tests.helpers.fed_refusals import refusals
from tests.helpers.places import ROOT

D = fed.Direction
CLIENTS = oracle.ragged_clients()
WORDS = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Flatten(), torch.nn.Linear(8, 2))


def once(algorithm, model=None, clients=CLIENTS, **options):
    fed.run(model or oracle.smooth_model(), clients, algorithm, rounds=1, **options)


def resolved(*flags):
    return config.resolve(config.read(ROOT / "examples" / "digits.toml", flags))


@refusals(
    # bad hyperparameters
    (lambda: fed.FedSAM(rho=-0.1), 'rho.*-0.1'),
    (lambda: fed.FedSAM(rho=math.nan), 'rho.*nan'),
    (lambda: fed.FedSAM(eta=0.1), 'adaptive=True'),
    (lambda: fed.FedSAM(adaptive=True, eta=-1), 'eta'),
    (lambda: fed.FedSAM(adaptive="yes"), "adaptive.*'yes'"),
    (lambda: fed.MoFedSAM(beta=1.5), 'beta.*<= 1.*1.5'),
    (lambda: fed.MoFedSAM(beta=-0.1), 'beta'),
    (lambda: fed.MoFedSAM(momentum_K="rounds"), "'steps', 'epochs'.*'rounds'"),
    (lambda: fed.FedAdagrad(beta1=1.5), 'beta1.*1.5'),
    (lambda: fed.FedYogi(beta2=-0.1), 'beta2.*-0.1'),
    (lambda: fed.FedAvgM(beta=-1), 'beta.*-1'),
    (lambda: fed.FedExP(eps=0), 'eps.*> 0.*0'),
    (lambda: fed.FedExP(average="no"), "average.*'no'"),
    (lambda: fed.LocalUpdate(rho=-1), 'rho'),
    (lambda: fed.LocalUpdate(perturbed_weight=math.inf), 'perturbed_weight must'),
    # fedexp computes the server's step size
    (lambda: once(fed.FedExP(), server_lr=0.5), 'FedExP has no learning rate: leave server_lr at 1, got 0.5'),
    # values outside their range
    (lambda: fed.FedAdam(beta1=1.5), 'beta1 .*<= 1, got 1.5'),
    (lambda: fed.FedAdam(beta2=-0.1), 'beta2 .*>= 0'),
    (lambda: fed.FedAdam(tau=0), 'tau .*> 0'),
    (lambda: fed.FedAdam(V0=-1), 'V0 .*>= 0'),
    (lambda: fed.FedAdam(bias_correction="yes"), 'bias_correction must be one of True, False'),
    (lambda: fed.FedAdam(bias_correction=True, V0=0.1), 'bias_correction .*needs V0 = 0'),
    (lambda: fed.FedAdam(bias_correction=True, beta1=1.0), 'beta1, beta2 < 1'),
    (lambda: fed.FedRobust(lam=-1), 'lam .*>= 0'),
    (lambda: fed.FedRobust(eta_2=-1), 'eta_2 .*>= 0'),
    (lambda: fed.FedRobust(ascent_steps=0), 'ascent_steps must be an integer >= 1'),
    (lambda: fed.FedRobust(form="rows"), "form must be one of 'full', 'channel', 'diag', None"),
    (lambda: fed.FedRobust(radius=0.1), r"radius must be two numbers \[e1, e2\].*got 0.1"),
    (lambda: fed.FedRobust(radius=(0.1,)), 'radius must be two numbers'),
    (lambda: fed.FedRobust(radius="0.1,0.2"), 'radius must be two numbers'),
    (lambda: fed.FedRobust(radius=(0.1, -0.1)), r"radius\[1\] .*>= 0"),
    (lambda: fed.FedCM(alpha=1.1), 'alpha .*<= 1, got 1.1'),
    (lambda: fed.FedCM(momentum_K="rounds"), "'steps', 'epochs'.*'rounds'"),
    (lambda: fed.MimeLite(beta=-0.1), 'beta .*>= 0'),
    (lambda: fed.FedSCAM(kappa=-1), 'kappa .*>= 0'),
    (lambda: fed.FedSCAM(pilots=0), 'pilots must be an integer >= 1'),
    (lambda: fed.MimeLite(momentum_form="nesterov"), "'convex', 'heavy_ball'"),
    (lambda: fed.FedDyn(phi=-1), 'phi .*>= 0'),
    (lambda: fed.FedDyn(phi_decay=0), 'phi_decay .*> 0'),
    (lambda: fed.FedProx(phi=math.inf), 'phi must be a finite number'),
    (lambda: fed.FedGSAM(alpha=-0.1), 'alpha .*>= 0'),
    (lambda: fed.FedGSAM(rho_min=-0.1), 'rho_min .*>= 0'),
    (lambda: fed.FedGSAM(lr_min=0.1), 'lr_min belongs to rho_min'),
    (lambda: fed.MoFedSAM(beta=1.1), 'beta .*<= 1'),
    (lambda: fed.FedSMOO(alpha=0), 'alpha .*> 0'),
    (lambda: fed.FedSMOO(s_rule="mean"), "'paper', 'mu_active', 'mu_all'.*'mean'"),
    (lambda: fed.FedSMOO(dyn=1), 'dyn must be one of True, False'),
    (lambda: fed.FedSpeed(alpha=1.5), 'alpha .*<= 1'),
    (lambda: fed.FedNSAM(perturb="dual"), "'gradient', 'momentum'.*'dual'"),
    (lambda: fed.FedLESAM(initial_perturbation="zero"), "'origin', 'none'.*'zero'"),
    (lambda: fed.FedLESAM_S(reference="server"), "'client', 'last_round'.*'server'"),
    (lambda: fed.FedLESAM_S(control_scale=-1), 'control_scale .*>= 0'),
    (lambda: fed.FedLESAM_D(phi=math.nan), 'phi'),
    (lambda: fed.Centralised_SAM(eta=0.1), 'adaptive=True'),
    # options of another algorithm in python
    (lambda: fed.FedSAM(roh=0.1),
     r"FedSAM has no option 'roh' \(did you mean 'rho'\?\); its options: rho, adaptive, eta", TypeError),
    (lambda: fed.FedDyn(alpha=0.1), "FedDyn has no option 'alpha'.*its options: phi, phi_decay", TypeError),
    (lambda: fed.FedAvg(rho=0.1), "FedAvg has no option 'rho'; its options: none", TypeError),
    # options on the command line
    (lambda: resolved("--algorithm", "feddyn", "--beta", "0.1"),
     'beta is an option of fedavgm, fedntd, fedscam, fedtoga, mimelite, mofedsam, not of feddyn'),
    (lambda: resolved("--algorithm", "fedlesam-s", "--fedlesam-s.phi", "0.1"), 'phi is an option of feddyn'),
    (lambda: resolved("--algorithm", "fedlesam-s", "--control-scal", "0.1"), "did you mean 'control_scale'"),
    (lambda: resolved("--algorithm", "fedlesam_s"), r"unknown algorithm 'fedlesam_s' \(did you mean 'fedlesam-s'\?\)"),
    (lambda: resolved("--algorithm", "fedcm", "--fedcm.alpha", "1.5"), 'alpha .*<= 1'),
    (lambda: resolved("--algorithm", "fedadam", "--bias-correction", "maybe"),
     "bias_correction must be bool, got 'maybe'"),
    (lambda: resolved("--algorithm", "fedsam", "--rho", "0.1*lrr"),
     "'lrr' is not known; names are round, lr, first_lr"),
    # fedrobust needs numbers as inputs
    (lambda: once(fed.FedRobust(), WORDS, [(torch.zeros(5, 2).long(), torch.arange(5) % 2)]),
     'floating-point inputs, got torch.int64'),
    # pfedme says where its proximal step diverges
    (lambda: once(fed.pFedMe(), lr=0.2), r"lr \* lam must be below 2.*got lr=0.2 and lam=15. Use an lr below 0.133"),
    # bad schedules
    (lambda: check_scheduled("rho", ""), "rho must be a number or a formula such as 0.05, .*got ''"),
    (lambda: check_scheduled("rho", "0.1/"), "got '0.1/'"),
    (lambda: check_scheduled("rho", "rounds/2"), "'rounds' is not known; names are round, lr, first_lr"),
    (lambda: check_scheduled("rho", "__import__('os').getcwd()"), 'is not known'),
    (lambda: check_scheduled("rho", "().__class__"), 'is not known'),
    (lambda: check_scheduled("rho", "lr.real"), "'lr.real' is not known"),
    (lambda: check_scheduled("rho", "[0.1][0]"), 'is not known'),
    (lambda: check_scheduled("rho", "'0.1'"), 'is not known'),
    (lambda: check_scheduled("rho", "True"), "'True' is not known"),
    (lambda: check_scheduled("rho", "1j"), "'1j' is not known"),
    (lambda: check_scheduled("rho", "0.1 if round else 0"), 'is not known'),
    (lambda: check_scheduled("rho", "sqrt(1, 2)"), 'sqrt takes 1 arguments, got 2'),
    (lambda: check_scheduled("rho", "linear(0.1, 0.2)"), 'linear takes 3 arguments, got 2'),
    (lambda: check_scheduled("rho", "max(1)"), 'max takes 2 arguments or more, got 1'),
    (lambda: check_scheduled("rho", "sqrt(x=1)"), 'sqrt'),
    (lambda: check_scheduled("rho", "-0.1"), "rho = '-0.1' must be a finite number >= 0, got -0.1"),
    (lambda: check_scheduled("rho", "1e999"), 'must be a finite number'),
    (lambda: check_scheduled("rho", "1/0"), "rho = '1/0' has no value: .*division by zero"),
    (lambda: check_scheduled("rho", -0.1), 'rho .*>= 0, got -0.1'),
    (lambda: check_scheduled("rho", math.nan), 'got nan'),
    (lambda: check_scheduled("rho", None), 'got None'),
    (lambda: check_scheduled("rho", True), 'got True'),
    (lambda: check_scheduled("rho", [0.1]), r"got \[0.1\]"),
    (lambda: check_scheduled("rho", "1+" * 100 + "1"), 'more than 200 characters'),
    (lambda: check_scheduled("rho", "(" * 99 + "1" + ")" * 99 + "-"), 'rho must be a number or a formula'),
    # pilots that do not fit
    (lambda: fed.Pilot(0, abs), 'batches must be an integer >= 1, got 0'),
    (lambda: fed.Pilot(1, 0.1), 'radius must be a function of norms and gradients, got 0.1'),
    (lambda: fed.LocalUpdate(pilot=fed.Pilot(1, abs)), "a pilot finds the radius of a perturbation.*'none'"),
    (lambda: fed.LocalUpdate(D.GRADIENT, full_gradient=True, pilot=fed.Pilot(1, abs)),
     'take the place of the full one.*full_gradient=True'),
    (lambda: fed.LocalUpdate(D.GRADIENT, pilot=fed.Pilot(1, abs), rho_end_factor=0.5),
     'a pilot finds one radius for the whole round; got rho_end_factor=0.5'),
    # fedntd needs labels
    (lambda: once(fed.FedNTD(), torch.nn.Linear(6, 1).double(), [(x, x[:, :1]) for x, _ in CLIENTS], loss=F.mse_loss),
     "FedNTD needs labels that number the model's outputs"),
    # samples that come in batches have no teacher
    (lambda: once(fed.FedNTD(), clients=[({"input": x}, y) for x, y in CLIENTS]),
     r"a term of the model's outputs needs inputs x of pairs \(x, y\)"),
)  # fmt: skip
def test_refused(call, words, error):
    with pytest.raises(error, match=words):
        call()
