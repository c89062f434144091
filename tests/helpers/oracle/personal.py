"""Methods whose clients have models of their own, in plain torch: modules, autograd and torch's SGD, one client after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .loop import Clients, Options, order

Active = Sequence[Sequence[int]]
Ended = tuple[nn.Module, list[nn.Module]]  # the shared model, and that of every client


def train(
    model: nn.Module,
    trained: Iterable[nn.Parameter],
    data: tuple[Tensor, Tensor],
    options: Options,
    t: int,
    client: int,
    epochs: Iterable[int],
    pull: Callable[[nn.Module], Tensor | float] = lambda model: 0.0,
) -> None:
    """Local steps of one client in round t on some of the parameters, in place. epochs: their numbers, which the order of samples depends on."""
    x, y = data
    lr = options.lr * options.lr_decay**t
    opt = torch.optim.SGD(list(trained), lr=lr, momentum=options.momentum, weight_decay=options.weight_decay)
    model.train()
    for epoch in epochs:
        for chosen in order(len(y), options.seed, t, client, epoch, options.shuffle).split(options.batch):
            opt.zero_grad()
            (F.cross_entropy(model(x[chosen]), y[chosen]) + pull(model)).backward()
            opt.step()


def average(shared: nn.Module, models: Sequence[nn.Module], names: Iterable[str], server_lr: float) -> None:
    """The shared model's parameters of those names, moved by the mean displacement of some clients' models, in place."""
    with torch.no_grad():
        for name in names:
            p = shared.get_parameter(name)
            p.add_(server_lr * torch.stack([m.get_parameter(name) - p for m in models]).mean(0))


def received(shared: nn.Module, own: nn.Module, stays: Sequence[str]) -> nn.Module:
    """A client's model at the start of its round: the shared one, with what stays with the client (names of a state_dict)."""
    model = copy.deepcopy(shared)
    mine = own.state_dict()
    model.load_state_dict({n: mine[n] if n in stays else v for n, v in shared.state_dict().items()})
    return model


def fedbn(model: nn.Module, clients: Clients, options: Options, active: Active, layers: Sequence[str]) -> Ended:
    """Li et al. 2021, Algorithm 1. layers: modules that stay, with all that their state_dict has."""
    shared = copy.deepcopy(model)
    own = [copy.deepcopy(model) for _ in clients]
    stays = [n for n in shared.state_dict() if n.rpartition(".")[0] in layers]
    sent = [n for n, _ in shared.named_parameters() if n not in stays]
    for t in range(options.rounds):
        for i in active[t]:
            own[i] = received(shared, own[i], stays)
            train(own[i], own[i].parameters(), clients[i], options, t, i, range(options.epochs))
        average(shared, [own[i] for i in active[t]], sent, options.server_lr)
    return shared, [received(shared, mine, stays) for mine in own]
