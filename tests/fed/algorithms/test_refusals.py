"""Refusals of the algorithms, with their messages."""

import math

import torch

from fastsam import fed
from fastsam.arena import Layout
from fastsam.fed.algorithms.schedule import check_scheduled, value_at
from fastsam.fed.update.model_copy import trainable
from fastsam.lab import config
from tests.helpers import oracle
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_runs import norm_model
from tests.helpers.places import ROOT

CLIENTS = oracle.ragged_clients()
EVEN = oracle.ragged_clients(sizes=(8, 12, 8))
MODEL = torch.nn.Linear(1, 1)
ROUND = fed.Round(
    3, 0.1, 1, 10, 2, 1.0, 0.2, fed.ParameterLayout.from_model(MODEL, Layout.from_tensors(trainable(MODEL)))
)
WORDS = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Flatten(), torch.nn.Linear(8, 2))


def start(algorithm, model=None, clients=CLIENTS, **options):
    fed.run(model or oracle.smooth_model(), clients, algorithm, **{"rounds": 1, **options})


def start_normalised(algorithm, **options):
    start(algorithm, norm_model().double(), EVEN, participation=1.0, **options)


def radius_of_round_4(value):
    check_scheduled("rho", value)  # which sees the first round
    value_at("rho", value, ROUND)


def resolve(*flags):
    return config.resolve(config.read(ROOT / "examples" / "digits.toml", flags))


test_refused = refusals(
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
    # fedexp computes the server's step size
    (lambda: start(fed.FedExP(), server_lr=0.5),
     'server_lr=0.5 needs .*the server.s step of FedExP has none. Leave server_lr at 1'),
    (lambda: start(fed.FedExP(), server_lr="1/sqrt(round)"), 'server_lr=.1/sqrt.round.. needs .* of FedExP has none'),
    (lambda: start(fed.FedDyn(), server_lr=0.5, run_dir="run"),
     "server_lr=0.5 needs .*the server.s step of FedDyn has none. Leave server_lr at 1"),
    (lambda: start(fed.FedLESAM_D(), server_lr=0.5, run_dir="run"),
     "server_lr=0.5 needs .*the server.s step of FedLESAM_D has none. Leave server_lr at 1"),
    (lambda: start(fed.FedSMOO(), server_lr=0.5, run_dir="run"),
     "server_lr=0.5 needs .*the server.s step of FedSMOO has none. Leave server_lr at 1"),
    # the lowest learning rate of gsam is below the first
    (lambda: start(fed.FedGSAM(rho_min=0.01, lr_min=0.3), lr=0.2, run_dir="run"),
     "lr_min must be below the run's first lr, 0.2; got 0.3"),
    (lambda: start(fed.FedGSAM(rho=0.5, rho_min=0.0, lr_min=0.15), lr=0.2, lr_decay=0.8, rounds=4),
     "rho in round 3 .*got -0.21"),
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
    (lambda: resolve("--algorithm", "feddyn", "--beta", "0.1"),
     'beta is an option of fedavgm, fedntd, fedscam, fedtoga, mimelite, mofedsam, not of feddyn'),
    (lambda: resolve("--algorithm", "fedlesam-s", "--fedlesam-s.phi", "0.1"), 'phi is an option of feddyn'),
    (lambda: resolve("--algorithm", "fedlesam-s", "--control-scal", "0.1"), "did you mean 'control_scale'"),
    (lambda: resolve("--algorithm", "fedlesam_s"), r"unknown algorithm 'fedlesam_s' \(did you mean 'fedlesam-s'\?\)"),
    (lambda: resolve("--algorithm", "fedcm", "--fedcm.alpha", "1.5"), 'alpha .*<= 1'),
    (lambda: resolve("--algorithm", "fedadam", "--bias-correction", "maybe"),
     "bias_correction must be bool, got 'maybe'"),
    (lambda: resolve("--algorithm", "fedsam", "--rho", "0.1*lrr"),
     "'lrr' is not known; names are round, lr, first_lr"),
    # fedrobust needs numbers as inputs
    (lambda: start(fed.FedRobust(), WORDS, [(torch.zeros(5, 2).long(), torch.arange(5) % 2)]),
     'floating-point inputs, got torch.int64'),
    # pfedme says where its proximal step diverges
    (lambda: start(fed.pFedMe(), lr=0.2), r"lr \* lam must be below 2.*got lr=0.2 and lam=15. Use an lr below 0.133"),
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
    (lambda: start(fed.FedSAM(rho="1/(round - 1)"), run_dir="run"), "has no value in round 1"),
    # radii that end later
    (lambda: radius_of_round_4("0.1 - 0.1*round"), r"rho in round 4 .*>= 0, got -0.3"),
    (lambda: radius_of_round_4("1/(round - 4)"), "has no value in round 4: .*division by zero"),
    (lambda: radius_of_round_4("sqrt(3 - round)"), "has no value in round 4"),
    (lambda: radius_of_round_4("10**(1000*round)"), "has no value in round 4"),
    (lambda: radius_of_round_4("(-round)**0.5"), "has no value in round 4"),
    (lambda: radius_of_round_4("linear(0.1, 0.2, 1)"), "has no value in round 4: .*needs n >= 2, got 1"),
    (lambda: radius_of_round_4(lambda round: -1.0), "rho in round 4 .*got -1.0"),
    (lambda: radius_of_round_4(lambda round: "0.1"), "rho in round 4 .*got '0.1'"),
    # parameters and buffers that stay with the clients
    (lambda: start(fed.FedBN()), "FedBN leaves normalisation layers .* the model has none: use FedAvg"),
    (lambda: start_normalised(fed.FedBN(), buffers="keep"),
     "FedBN leaves the model's buffers with the clients, and buffers='keep' does not"),
    (lambda: start_normalised(fed.FedBN(), aggregation="median"),
     "FedBN, whose parameters stay .* aggregation='median' compares whole models"),
    (lambda: start_normalised(fed.Centralised_SGD(), buffers="local"),
     "buffers='local' needs clients, but Centralised_SGD has none"),
    (lambda: start_normalised(fed.FedSAM(), buffers="local", measures=["train"]),
     "measures use .* buffers='local' changes them"),
    # phases and second models
    (lambda: start(fed.Ditto(), local_parameters="2"),
     "Ditto needs .* local_parameters='2'. Leave out local_parameters: the clients have whole models"),
    (lambda: start_normalised(fed.Ditto(), buffers="average"), "Ditto needs one set of buffers .* buffers='average'"),
    (lambda: start_normalised(fed.APFL(), buffers="average"), "APFL needs one set of buffers"),
    (lambda: start(fed.Ditto(), measures=["drifts"]), r"measures=\['drifts'\] needs one path .* Ditto has phases"),
    (lambda: start(fed.FedRep(head="nose")), "'nose' matches no trainable parameter"),
    (lambda: start(fed.FedRep(), torch.nn.Linear(6, 3).double()), "are all parameters of the model"),
    (lambda: start(fed.FedRep(), aggregation="krum", participation=1.0),
     "FedRep, whose parameters stay .* aggregation='krum' compares whole models"),
    (lambda: fed.FedRep(head=""), "head must be the name of a module or a parameter"),
    (lambda: fed.FedRep(head_epochs=0), "head_epochs must be an integer >= 1"),
    (lambda: fed.Ditto(epochs=0), "epochs must be an integer >= 1"),
    (lambda: fed.Ditto(lam=-1), "lam must"),
    (lambda: fed.pFedMe(K=0), "K must be an integer >= 1"),
    (lambda: fed.APFL(alpha=1.5), "alpha must .*<= 1, got 1.5"),
    (lambda: fed.APFL(eta_alpha=-1), "eta_alpha .None for the local learning rate. must"),
)  # fmt: skip
