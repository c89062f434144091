"""Local updates by optimizers of torch (`fed.run(optimizer=...)`), against loops in plain torch."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fastsam import Lion, fed
from fastsam.fed.algorithms.base import has_loop
from fastsam.fed.algorithms.fednova import weight_of_gradients
from fastsam.fed.loop.options import Settings
from tests.helpers import oracle
from tests.promises.step_cases import ALGORITHMS, layer_normed

OPTIONS = {"rounds": 3, "batch_size": 5, "participation": 1.0, "shuffle": False, "lr": 0.05, "executor": "sequential"}


def train(algorithm, optimizer, **options):
    return run(algorithm, optimizer, **options).model


def run(algorithm, optimizer, **options):
    has_rate = isinstance(optimizer, partial) and "lr" in optimizer.keywords
    options = {**OPTIONS, "lr": None if has_rate else OPTIONS["lr"], **options}
    return fed.run(oracle.smooth_model(), oracle.ragged_clients(), algorithm, optimizer=optimizer, **options)


def twin(optimizer, rho, active=None, keeps=False):
    """Federated averaging whose clients train with `optimizer`, with steps of SAM.

    `active` are the clients of each round, by default all. With `keeps` each client has one optimizer for all rounds.
    """
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    models, optimizers = [copy.deepcopy(model) for _ in clients], {}
    w = [p.detach().clone() for p in model.parameters()]
    for t in range(OPTIONS["rounds"]):
        deltas = []
        for i in range(len(clients)) if active is None else active[t]:
            (x, y), model = clients[i], models[i]
            parameters = list(model.parameters())
            with torch.no_grad():
                for p, start in zip(parameters, w, strict=True):
                    p.copy_(start)
            opt = optimizers[i] if keeps and i in optimizers else optimizer(parameters)
            optimizers[i] = opt
            for bx, batch_y in zip(x.split(5), y.split(5), strict=True):
                grads = torch.autograd.grad(F.cross_entropy(model(bx), batch_y), parameters)
                if rho:
                    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt() + 1e-7
                    clean_weights = [p.detach().clone() for p in parameters]
                    with torch.no_grad():
                        for p, g in zip(parameters, grads, strict=True):
                            p.add_(g, alpha=rho / norm.item())
                    grads = torch.autograd.grad(F.cross_entropy(model(bx), batch_y), parameters)
                    with torch.no_grad():
                        for p, clean_weight in zip(parameters, clean_weights, strict=True):
                            p.copy_(clean_weight)
                for p, g in zip(parameters, grads, strict=True):
                    p.grad = g
                opt.step()
            deltas.append([p.detach() - start for p, start in zip(parameters, w, strict=True)])
        w = [
            start + torch.stack(client_deltas).mean(0)
            for start, client_deltas in zip(w, zip(*deltas, strict=True), strict=True)
        ]
    with torch.no_grad():
        for p, value in zip(model.parameters(), w, strict=True):
            p.copy_(value)
    return model


RULES = {
    "SGD, Nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, dampening": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.2),  # torch's step
    "Adam": partial(torch.optim.Adam, lr=0.02, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "AdamW, amsgrad": partial(torch.optim.AdamW, lr=0.02, amsgrad=True),  # torch's step
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1, lr_decay=0.1, weight_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Lion": partial(Lion, lr=0.01, weight_decay=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),  # torch's step
}
TORCH_STEPS = ("SGD, dampening", "AdamW, amsgrad", "Adadelta")


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("executor", ["sequential", "threads", "streams", "graph", "vmap"])
@pytest.mark.parametrize("name", RULES)
def test_every_executor_trains_with_every_rule(name, executor):
    """Clients of unequal sizes, plain and with steps of SAM, against a loop with the optimizer of torch."""
    if name in TORCH_STEPS and executor in ("graph", "vmap"):
        with pytest.raises(ValueError, match="it serves the optimizers SGD, Adam, AdamW, Adagrad, RMSprop and Lion"):
            train(fed.FedAvg(), RULES[name], executor=executor)
        return
    for algorithm, rho in ((fed.FedAvg(), 0.0), (fed.FedSAM(rho=0.3), 0.3)):
        result = train(algorithm, RULES[name], executor=executor, slots=3)
        assert oracle.difference(result, twin(RULES[name], rho)) < 1e-12, algorithm


# --- The state of the optimizer between rounds


PAUSES = [[0, 3, 4], [1, 2, 4], [0, 2, 3, 4]]
KEPT = [
    *(("sequential", name) for name in RULES),
    *(("vmap", name) for name in RULES if name not in TORCH_STEPS),
    *itertools.product(("threads", "streams"), ("AdamW", "AdamW, amsgrad")),
    ("graph", "AdamW"),
]


def run_with_pauses(algorithm, optimizer, **options):
    return run(algorithm, optimizer, sampler=lambda t, generator: PAUSES[t], optimizer_state="keep", **options)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(("executor", "name"), KEPT)
def test_a_client_keeps_the_state_of_its_optimizer(executor, name):
    """Against a loop with one optimizer of torch for each client, in which clients pause."""
    rho = 0.3 if name == "AdamW" else 0.0
    algorithm = fed.FedSAM(rho=rho) if rho else fed.FedAvg()
    result = run_with_pauses(algorithm, RULES[name], executor=executor, slots=2).model
    assert oracle.difference(result, twin(RULES[name], rho, PAUSES, keeps=True)) < 1e-12
    assert oracle.difference(result, twin(RULES[name], rho, PAUSES)) > 1e-6  # the state matters


@pytest.mark.parametrize("algorithm", [fed.FedSCAM(rho=0.3), fed.SCAFFOLD(), fed.FedSMOO(rho=0.1), fed.MOON()])
def test_executors_agree_about_kept_states(algorithm):
    """Algorithms with a radius for each client, with states of clients, and with a loop."""
    options = {"optimizer": RULES["AdamW"], "local_parameters": None if has_loop(algorithm) else "2"}
    other = "threads" if has_loop(algorithm) else "vmap"
    models = [run_with_pauses(algorithm, executor=e, slots=2, **options).model for e in ("sequential", other)]
    assert oracle.difference(*models) < 1e-12


@pytest.mark.parametrize("name", ["AdamW", "AdamW, amsgrad"])
def test_kept_states_are_in_checkpoints(name, tmp_path):
    def train(rounds, state="keep", **options):
        options |= {"sampler": lambda t, generator: PAUSES[t], "optimizer_state": state, "rounds": rounds}
        return run(fed.FedAvg(), RULES[name], **options).model

    train(2, run_dir=tmp_path / "run")
    with pytest.raises(fed.RunDirectoryError, match="another optimizer_state"):
        train(3, "reset", run_dir=tmp_path / "run", resume=True)
    assert oracle.difference(train(3, run_dir=tmp_path / "run", resume=True), train(3)) == 0


class Counting(torch.optim.SGD):
    """SGD whose rate falls with a Python number of its group, and which counts in a number of its state."""

    def step(self, closure=None):
        group = self.param_groups[0]
        group["step"] = group.get("step", 0) + 1
        for p in group["params"]:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1
            assert self.state[p]["count"] == group["step"] and isinstance(group["step"], int)
            p.data.add_(p.grad, alpha=-group["lr"] / group["step"])


def test_an_optimizer_may_keep_numbers():
    result = run_with_pauses(fed.FedAvg(), Counting).model
    assert oracle.difference(result, twin(partial(Counting, lr=OPTIONS["lr"]), 0.0, PAUSES, keeps=True)) < 1e-12


class Listing(torch.optim.SGD):
    """SGD that keeps a list."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["past"] = [p]


def test_other_values_in_a_state_are_refused():
    with pytest.raises(ValueError, match="keeps tensors and numbers. Listing keeps a list as 'past'"):
        run_with_pauses(fed.FedAvg(), Listing)


def test_names_of_rules():
    assert oracle.difference(train(fed.FedAvg(), "Lion"), train(fed.FedAvg(), partial(Lion, lr=OPTIONS["lr"]))) == 0


@pytest.mark.parametrize("algorithm", [fed.FedSMOO(rho=0.1), fed.FedWMSAM(), fed.FedGSAM(), fed.FedSpeed(), fed.APFL()])
def test_a_rule_serves_all_directions(algorithm):
    """The executors agree, also in loops and second models."""
    plain = train(algorithm, RULES["AdamW"])
    assert oracle.difference(plain, train(algorithm, RULES["AdamW"], executor="threads")) == 0
    if not has_loop(algorithm):
        assert oracle.difference(plain, train(algorithm, RULES["AdamW"], executor="vmap", slots=3)) < 1e-12


# --- Optimizers of torch that the kernels do not have, under every algorithm


class TorchSGD(torch.optim.SGD):
    """SGD of torch, which is not recognised as the kernels' rule."""


ONLY_TORCH = {
    "SGD": partial(TorchSGD, lr=0.05, momentum=0.5, weight_decay=0.1),
    "SGD, dampening": RULES["SGD, dampening"],
    "Adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.05),
}
TWO, SHIFTED = "an update with two gradients needs one of the kernels' rules", "weights that are shifted for the whole"
FALLING, SECOND = "a learning rate that changes within a round needs", "a second model needs one of the kernels'"
MOMENTS = "FedAdamW needs a fused local optimizer that keeps exp_avg_sq"
REFUSED = {
    "apfl": SECOND, "fedadamw": MOMENTS, "fedadamw-sam": MOMENTS, "fedgsam": TWO, "fedgsam-schedule": TWO,
    "fedlesam": SHIFTED, "fedlesam-d": SHIFTED, "fedlesam-none": SHIFTED, "fedlesam-s": SHIFTED, "fedmoswa": FALLING,
    "fedspeed": TWO, "fedswa": FALLING,
}  # fmt: skip
LATE = ("fedlesam-none",)  # its first round has no perturbation


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param(name, optimizer, marks=[] if i % len(ONLY_TORCH) == j or not j else pytest.mark.slow)
        for i, name in enumerate(ALGORITHMS)
        for j, optimizer in enumerate(ONLY_TORCH)
    ],
)
def test_every_algorithm_trains_by_an_optimizer_of_torch_or_is_refused(name, optimizer):
    """With SGD it has the numbers of the kernels' SGD. A refusal comes before round 1, and says what is missing."""
    algorithm, records = ALGORITHMS[name], []
    options = {**OPTIONS, "lr": None, "progress": records.append}
    start = partial(fed.run, layer_normed(), oracle.ragged_clients(), algorithm)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            start(optimizer=ONLY_TORCH[optimizer], **options)
        assert len(records) == (name in LATE)
        return
    model = start(optimizer=ONLY_TORCH[optimizer], **options).model
    assert oracle.movement(model, layer_normed()) > 1e-3 and all(p.isfinite().all() for p in model.parameters())
    if optimizer == "SGD":
        kernels = start(momentum=0.5, weight_decay=0.1, **options | {"lr": 0.05}).model
        assert oracle.difference(model, kernels) < 1e-12


# --- The rate of the run


SGD = partial(torch.optim.SGD, lr=0.02)


class Rateless(torch.optim.SGD):
    """SGD whose rate is its own."""

    def __init__(self, params):
        super().__init__(params, lr=0.02)


def ignore_rate(params, **options):
    """Return an optimizer that does not use the rate that it gets."""
    return torch.optim.SGD(params, lr=0.02)


def rate_groups(params, lr):
    """Return an optimizer whose parameters have different rates."""
    return torch.optim.SGD([{"params": params[:1], "lr": lr / 2}, {"params": params[1:]}], lr=lr)


@pytest.mark.parametrize(
    "algorithm",
    [fed.SCAFFOLD(), fed.FedCM(), fed.MoFedSAM(), fed.FedGAMMA(), fed.FedRobust(), fed.FedSAM(rho="2*lr")],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_the_rate_of_a_partial_is_the_rate_of_the_run(algorithm):
    with_torch, with_kernels = run(algorithm, SGD, lr_decay=0.5), run(algorithm, None, lr=0.02, lr_decay=0.5)
    assert oracle.difference(with_torch.model, with_kernels.model) < 1e-12
    assert [record["lr"] for record in with_torch.history] == [0.02, 0.01, 0.005]
    assert with_torch.settings.lr == 0.02


@pytest.mark.parametrize(
    ("optimizer", "lr"),
    [(None, 0.1), ("SGD", 0.1), (partial(torch.optim.SGD, momentum=0.5), 0.1), ("AdamW", 0.001), ("Adagrad", 0.01)],
)
def test_a_class_without_a_rate_has_its_default_in_torch_and_sgd_has_the_default_of_a_run(optimizer, lr):
    result = run(fed.FedAvg(), optimizer, lr=None)
    assert [record["lr"] for record in result.history] == [lr] * 3
    assert oracle.difference(result.model, run(fed.FedAvg(), optimizer, lr=lr).model) == 0


def test_a_schedule_applies_to_a_class():
    results = [run(fed.SCAFFOLD(), optimizer, lr="0.1/round") for optimizer in ("SGD", None)]
    assert oracle.difference(*(result.model for result in results)) < 1e-12


def test_the_same_rate_may_be_named_twice():
    assert run(fed.FedAvg(), SGD, lr=0.02).settings.lr == 0.02


@pytest.mark.parametrize("optimizer", [Rateless, ignore_rate, rate_groups])
def test_an_optimizer_of_an_unknown_rate_serves_algorithms_that_do_not_use_it(optimizer):
    result = run(fed.FedAvg(), optimizer, lr=None)
    assert {record["lr"] for record in result.history} == {None if optimizer is Rateless else 0.1}
    if optimizer is not rate_groups:
        assert oracle.difference(result.model, train(fed.FedAvg(), SGD)) < 1e-12
    for algorithm in (fed.SCAFFOLD(), fed.FedCM(), fed.FedGAMMA(), fed.FedNova(), fed.FedRobust(), fed.FedMoSWA()):
        with pytest.raises(ValueError, match=rf"^{type(algorithm).__name__} needs .*{optimizer.__name__}.*partial"):
            run(algorithm, optimizer, lr=None)
    assert run(fed.FedRobust(eta_2=0.1), optimizer, lr=None).history


def test_the_clients_rate_of_an_unknown_rate_has_no_value_in_formulas():
    with pytest.raises(ValueError, match="rho in round 1 must be a finite number"):
        run(fed.FedSAM(rho="2*lr"), Rateless, lr=None)


def test_an_unknown_rate_can_be_resumed(tmp_path):
    for rounds in (1, 2):
        result = run(fed.FedAvg(), Rateless, lr=None, rounds=rounds, run_dir=tmp_path / "run", resume=rounds > 1)
    assert [record["lr"] for record in result.history] == [None, None]


@pytest.mark.parametrize(
    "options", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.3}, {}]
)
def test_fednova_normalises_by_the_optimizers_momentum(options):
    """A client whose gradient is constant moves by |a| times the rate, so that its normalised delta is one step."""
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=1.0, **options)
    for _ in range(5):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    settings = Settings(optimizer=partial(torch.optim.SGD, **options))
    round = settings.round(0, 1, 1, None)
    assert weight_of_gradients(5, round.momentum, round.dampening, round.nesterov) == pytest.approx(
        -parameter.item(), rel=1e-12
    )


def test_finetune_trains_with_the_optimizer_of_the_run():
    clients, make = oracle.ragged_clients(), partial(torch.optim.AdamW, lr=0.02)
    test = clients[0]
    result = fed.run(oracle.smooth_model(), clients, fed.FedAvg(), optimizer=make, rounds=1, lr_decay=0.5, test=test)
    rates = []

    class Spy(torch.optim.AdamW):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    object.__setattr__(result.settings, "optimizer", Spy)
    fed.finetune(result, clients[:1], test=test)
    fed.finetune(result, clients[:1], test=test, lr=0.5)
    assert set(rates) == {0.02, 0.5}


def test_a_parameter_that_a_client_does_not_train_keeps_its_value():
    model, head = oracle.smooth_model(), fed.FedRep(head="2")
    result = fed.run(model, oracle.ragged_clients(), head, optimizer="AdamW", **OPTIONS)
    assert torch.equal(result.model[2].weight, model[2].weight)
    assert not torch.equal(result.model[0].weight, model[0].weight)
