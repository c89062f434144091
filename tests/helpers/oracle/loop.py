"""The loop over rounds, clients and local steps. A method gives the direction of a step and the states (see
`plain.FedAvg`)."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam.fed.clients import sampling
from fastsam.fed.common import seeds

Vector = list[Tensor]  # one tensor per parameter
State = dict[str, Any]  # state or message of a server or a client
Clients = Sequence[tuple[Tensor, Tensor]]
NU = 1e-7  # added to the norm of a direction


@dataclass
class Options:
    """Options of a run that do not depend on the method."""

    rounds: int = 4
    epochs: int = 1
    batch: int = 5
    lr: float = 0.1
    lr_decay: float = 0.9
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    scope: str = "full"
    weighting: str = "uniform"
    server_lr: float = 1.0
    shuffle: bool = False
    seed: int = 0

    def keywords(self) -> dict[str, Any]:
        """Return the options as keywords of fastsam.fed.run."""
        return {
            "rounds": self.rounds, "local_epochs": self.epochs, "batch_size": self.batch, "lr": self.lr,
            "lr_decay": self.lr_decay,
            "momentum": self.momentum, "weight_decay": self.weight_decay, "clip_norm": self.clip,
            "clip_scope": self.scope,
            "weighting": self.weighting, "server_lr": self.server_lr, "shuffle": self.shuffle, "seed": self.seed,
        }  # fmt: skip


@dataclass
class Visit:
    """One client in one round.

    Attributes:
        anchor: received model.
        server: state of the server.
        state: state of this client, written in place.
    """

    model: nn.Module
    loss_function: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    t: int
    lr: float
    epochs: int
    seed: int
    anchor: Vector
    server: State
    state: State
    first_lr: float
    client: int = 0
    momentum: float = 0.0
    steps: int = 0
    rates: float = 0.0  # added up over the steps so far
    batches: list[Tensor] = field(default_factory=list)  # sample indices of the local steps
    notes: State = field(default_factory=dict)  # constants of this round

    def loss(self, weights: Vector, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss at those weights. Random numbers of a model are the same in all passes of a step."""
        self.seed_pass()
        with torch.no_grad():
            for p, w in zip(self.model.parameters(), weights, strict=True):
                p.copy_(w)
        return self.loss_function(self.model(x), y)

    def seed_pass(self) -> None:
        """Set the numbers that a pass of the present step draws."""
        torch.manual_seed(seeds.derive(self.seed, "pass", self.steps))

    def gradient(self, weights: Vector, x: Tensor, y: Tensor) -> Vector:
        return list(torch.autograd.grad(self.loss(weights, x, y), list(self.model.parameters())))


@dataclass
class RoundResults:
    """Results of all clients of a round, as the server receives them."""

    t: int
    lr: float
    server_lr: float
    clients: int
    share: dict[int, float]  # weight of each active client in a mean; they sum to 1
    delta: dict[int, Vector]
    uploads: dict[int, State]
    states: dict[int, dict[str, Any]]  # states of all clients that have taken part

    def mean(self, vectors: dict[int, Vector]) -> Vector:
        return add(*[scale_vector(self.share[i], v) for i, v in vectors.items()])

    def mean_move(self) -> Vector:
        return self.mean(self.delta)

    def mean_upload(self, name: str) -> Vector:
        return self.mean({i: s[name] for i, s in self.uploads.items()})


def scale_vector(factor: float, vector: Vector) -> Vector:
    return [factor * v for v in vector]


def add(*vectors: Vector) -> Vector:
    return [sum(tensors) for tensors in zip(*vectors, strict=True)]


def minus(a: Vector, b: Vector) -> Vector:
    return [p - q for p, q in zip(a, b, strict=True)]


def value_at(t: int, number: Any) -> float:
    """Return a hyper-parameter in round t, which is a number or a function of t."""
    return number(t) if callable(number) else number


def zeros(like: Vector) -> Vector:
    return [torch.zeros_like(p) for p in like]


def norm(vector: Vector) -> float:
    return sum(v.double().square().sum().item() for v in vector) ** 0.5


def unit(vector: Vector) -> Vector:
    return scale_vector(1 / (norm(vector) + NU), vector)


def values(model: nn.Module) -> Vector:
    return [p.detach().clone() for p in model.parameters()]


def order(n: int, seed: int, t: int, client: int, epoch: int, shuffle: bool) -> Tensor:
    """Return the order of a client's samples, which is a public fact of a run."""
    return seeds.permutations([client], [n], seed, "shuffle", t, epoch)[0] if shuffle else torch.arange(n)


def attendance(rounds: int, clients: int, share: float, seed: int, sampler: str = "fixed") -> list[list[int]]:
    """Return the clients of each round, a public fact of a run."""
    draw = sampling.make(sampler, clients, share)
    return [sampling.draw(draw, t, seed) for t in range(rounds)]


def clip_vector(inside: Vector, limit: float | None) -> Vector:
    return inside if limit is None else scale_vector(min(1.0, limit / (norm(inside) + 1e-6)), inside)


def local_training(visit: Visit, method: Any, options: Options) -> Vector:
    """Return the displacement of a client."""
    origin = method.origin(visit)
    w, velocity = [p.clone() for p in origin], zeros(visit.anchor)
    for indices in visit.batches:
        v = method.follow(visit, w, visit.x[indices], visit.y[indices])
        phi = method.proximal(visit.t)
        if options.scope == "full":
            v = clip_vector(add(v, scale_vector(phi, minus(w, origin))), options.clip)
        # the released code: the constant half of the proximal term is clipped with the gradient, phi*w is weight decay
        else:
            v = add(clip_vector(minus(v, scale_vector(phi, origin)), options.clip), scale_vector(phi, w))
        v = add(v, scale_vector(options.weight_decay, w))
        velocity = add(scale_vector(options.momentum, velocity), v)
        rate = visit.lr * method.pace(visit.steps, len(visit.batches))
        w = minus(w, scale_vector(rate, velocity))
        visit.rates += rate
        visit.steps += 1
    return minus(w, origin)


def run(
    model: nn.Module,
    clients: Clients,
    method: Any,
    options: Options,
    active: Sequence[Sequence[int]],
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> nn.Module:
    """Train for all rounds and return the final model.

    Args:
        active: the clients of each round.
    """
    model = copy.deepcopy(model)
    w, states = values(model), dict[int, State]()
    server = method.start_server(w)
    with torch.random.fork_rng():
        for t in range(options.rounds):
            lr = options.lr * options.lr_decay**t
            weights = {i: len(clients[i][1]) if options.weighting == "samples" else 1 for i in active[t]}
            share = {i: n / sum(weights.values()) for i, n in weights.items()}
            results = RoundResults(t, lr, options.server_lr, len(clients), share, {}, {}, states)
            for i in active[t]:
                state = states[i] if i in states else method.start_client(w)
                visit = Visit(model, loss, *clients[i], t, lr, options.epochs,
                    seeds.derive(options.seed, "client", t, i), w,
                              server, state, options.lr, i, options.momentum)  # fmt: skip
                for epoch in range(options.epochs):
                    visit.batches += order(len(visit.y), options.seed, t, i, epoch, options.shuffle).split(
                        options.batch
                    )
                method.begin(visit)
                results.delta[i] = local_training(visit, method, options)
                results.uploads[i] = method.finish(visit, results.delta[i])
                states[i] = state
            w = method.serve(server, w, results)
    with torch.no_grad():
        for p, value in zip(model.parameters(), w, strict=True):
            p.copy_(value)
    return model
