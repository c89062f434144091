"""Methods with client models in plain torch: modules and autograd, one client after the other."""

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .loop import Clients, Options, order

Active = Sequence[Sequence[int]]
Ended = tuple[nn.Module, list[nn.Module]]  # the shared model, and each client's model


def descent(parameters: Iterable[nn.Parameter], options: Options, t: int) -> Callable[[Tensor], None]:
    """Return a function that takes a step of gradient descent in round t, with momentum and weight decay, in place."""
    trained_parameters, lr = list(parameters), options.lr * options.lr_decay**t
    velocity = [torch.zeros_like(p) for p in trained_parameters]

    def step(loss: Tensor) -> None:
        gradients = torch.autograd.grad(loss, trained_parameters)
        with torch.no_grad():
            for p, v, g in zip(trained_parameters, velocity, gradients, strict=True):
                v.mul_(options.momentum).add_(g + options.weight_decay * p)
                p.sub_(lr * v)

    return step


def train(
    model: nn.Module,
    trained_parameters: Iterable[nn.Parameter],
    data: tuple[Tensor, Tensor],
    options: Options,
    t: int,
    client: int,
    epochs: Iterable[int],
    pull: Callable[[nn.Module], Tensor | float] = lambda model: 0.0,
) -> None:
    """Take the local steps of one client in round t on some of the parameters, in place.

    Args:
        epochs: numbers of the epochs, on which the order of samples depends.
    """
    x, y = data
    descend = descent(trained_parameters, options, t)
    model.train()
    for epoch in epochs:
        for indices in order(len(y), options.seed, t, client, epoch, options.shuffle).split(options.batch):
            descend(F.cross_entropy(model(x[indices]), y[indices]) + pull(model))


def average(shared_model: nn.Module, models: Sequence[nn.Module], names: Iterable[str], server_lr: float) -> None:
    """The shared model's parameters of those names, moved by the mean displacement of some clients' models, in
    place."""
    with torch.no_grad():
        for name in names:
            p = shared_model.get_parameter(name)
            p.add_(server_lr * torch.stack([m.get_parameter(name) - p for m in models]).mean(0))


def receive(shared_model: nn.Module, client_model: nn.Module, stays: Sequence[str]) -> nn.Module:
    """Return a client's model at the start of its round: the shared one, except the local entries `stays` of a
    state_dict."""
    model = copy.deepcopy(shared_model)
    local_state = client_model.state_dict()
    model.load_state_dict({n: local_state[n] if n in stays else v for n, v in shared_model.state_dict().items()})
    return model


def fedbn(model: nn.Module, clients: Clients, options: Options, active: Active, layers: Sequence[str]) -> Ended:
    """Train by Li et al. 2021, Algorithm 1.

    Args:
        layers: modules that stay, with all that their state_dict has.
    """
    shared_model = copy.deepcopy(model)
    models = [copy.deepcopy(model) for _ in clients]
    stays = [n for n in shared_model.state_dict() if n.rpartition(".")[0] in layers]
    sent_names = [n for n, _ in shared_model.named_parameters() if n not in stays]
    for t in range(options.rounds):
        for i in active[t]:
            models[i] = receive(shared_model, models[i], stays)
            train(models[i], models[i].parameters(), clients[i], options, t, i, range(options.epochs))
        average(shared_model, [models[i] for i in active[t]], sent_names, options.server_lr)
    return shared_model, [receive(shared_model, model_of_client, stays) for model_of_client in models]


def fedrep(
    model: nn.Module, clients: Clients, options: Options, active: Active, head: Sequence[str], head_epochs: int
) -> Ended:
    """Collins et al. 2021, Algorithm 1: epochs of the head, then of the representation. `head` has parameter names."""
    shared_model = copy.deepcopy(model)
    models = [copy.deepcopy(model) for _ in clients]
    sent_names = [n for n, _ in shared_model.named_parameters() if n not in head]
    for t in range(options.rounds):
        for i in active[t]:
            models[i] = receive(shared_model, models[i], head)
            phases = [(head, range(head_epochs)), (sent_names, range(head_epochs, head_epochs + options.epochs))]
            for names, epochs in phases:
                for n, p in models[i].named_parameters():
                    p.requires_grad_(n in names)
                train(models[i], [models[i].get_parameter(n) for n in names], clients[i], options, t, i, epochs)
        average(shared_model, [models[i] for i in active[t]], sent_names, options.server_lr)
    return shared_model, [receive(shared_model, model_of_client, head) for model_of_client in models]


def distance(model: nn.Module, anchor: nn.Module) -> Tensor:
    """Return half the squared distance of two models' parameters."""
    pairs = zip(model.parameters(), anchor.parameters(), strict=True)
    return torch.stack([(p - q.detach()).square().sum() for p, q in pairs]).sum() / 2


def ditto(
    model: nn.Module, clients: Clients, options: Options, active: Active, lam: float, epochs: int | None = None
) -> Ended:
    """Li et al. 2021, Algorithm 1. A client that has not taken part has the global model.

    Its model begins as the first global model that it receives.
    """
    shared_model = copy.deepcopy(model)
    models: dict[int, nn.Module] = {}
    names = [n for n, _ in shared_model.named_parameters()]
    for t in range(options.rounds):
        results = []
        for i in active[t]:
            client_model = models.setdefault(i, copy.deepcopy(shared_model))
            passes = range(options.epochs if epochs is None else epochs)
            train(
                client_model,
                client_model.parameters(),
                clients[i],
                options,
                t,
                i,
                passes,
                lambda m: lam * distance(m, shared_model),
            )
            results.append(copy.deepcopy(shared_model))
            train(results[-1], results[-1].parameters(), clients[i], options, t, i, range(options.epochs))
        average(shared_model, results, names, options.server_lr)
    return shared_model, [models.get(i, shared_model) for i in range(len(clients))]


def pfedme(
    model: nn.Module, clients: Clients, options: Options, active: Active, lam: float, K: int, eta: float
) -> Ended:
    """Dinh et al. 2020, Algorithm 1, with K steps of SGD for theta on each batch, begun where it was."""
    shared_model = copy.deepcopy(model)
    models: dict[int, nn.Module] = {}
    names = [n for n, _ in shared_model.named_parameters()]
    for t in range(options.rounds):
        results = []
        for i in active[t]:
            theta, local = copy.deepcopy(shared_model), copy.deepcopy(shared_model)
            descend = descent(theta.parameters(), options, t)
            x, y = clients[i]
            for epoch in range(options.epochs):
                for indices in order(len(y), options.seed, t, i, epoch, options.shuffle).split(options.batch):
                    for _ in range(K):
                        descend(F.cross_entropy(theta(x[indices]), y[indices]) + lam * distance(theta, local))
                    with torch.no_grad():
                        for w, p in zip(local.parameters(), theta.parameters(), strict=True):
                            w.sub_(eta * lam * (w - p))
            models[i] = theta
            results.append(local)
        average(shared_model, results, names, options.server_lr)
    return shared_model, [models.get(i, shared_model) for i in range(len(clients))]


def mix(alpha: Tensor, v: nn.Module, w: nn.Module) -> dict[str, Tensor]:
    """Return alpha*v + (1 - alpha)*w by name, with gradients to alpha and v."""
    return {n: alpha * p + (1 - alpha) * w.get_parameter(n).detach() for n, p in v.named_parameters()}


def apfl(
    model: nn.Module, clients: Clients, options: Options, active: Active, alpha: float, eta_alpha: float | None = None
) -> Ended:
    """Deng et al. 2020, Algorithm 1, all derivatives by autograd; alpha moves in the first step of a round."""
    shared_model = copy.deepcopy(model)
    models: dict[int, tuple[nn.Module, Tensor]] = {}
    names = [n for n, _ in shared_model.named_parameters()]
    for t in range(options.rounds):
        results = []
        rate = options.lr * options.lr_decay**t if eta_alpha is None else eta_alpha
        for i in active[t]:
            v, a = models.get(i, (copy.deepcopy(shared_model), torch.tensor(alpha, dtype=torch.float64)))
            w = copy.deepcopy(shared_model)
            down_v, down_w = descent(v.parameters(), options, t), descent(w.parameters(), options, t)
            x, y = clients[i]
            places = [order(len(y), options.seed, t, i, e, options.shuffle) for e in range(options.epochs)]
            for k, indices in enumerate(part for epoch in places for part in epoch.split(options.batch)):
                a.requires_grad_()
                loss = F.cross_entropy(functional_call(v, mix(a, v, w), x[indices]), y[indices])
                (slope,) = torch.autograd.grad(loss, a, retain_graph=True)
                down_v(loss)
                down_w(F.cross_entropy(w(x[indices]), y[indices]))
                a = (a - rate * slope).clamp(0, 1).detach() if k == 0 else a.detach()
            models[i] = v, a
            results.append(w)
        average(shared_model, results, names, options.server_lr)
    client_models = [copy.deepcopy(shared_model) for _ in clients]
    for i, (v, a) in models.items():
        client_models[i].load_state_dict({n: p.detach() for n, p in mix(a, v, shared_model).items()})
    return shared_model, client_models
