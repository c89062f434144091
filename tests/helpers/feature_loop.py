"""A plain federated loop that adds to `oracle.run` the work of each feature of a run: personal parameters, compression,
clipping, optimizers of torch, losses of all kinds, buffers, traffic, and numbers over clients.

Nothing of fastsam computes here. It shares public facts of a run: the clients of a round, the orders of their samples,
the seeds of a model's random numbers, and the clients' samples of the test set.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from fastsam.fed.common import seeds
from tests.helpers import oracle
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.feature_cases import (
    ALGORITHMS,
    BATCH,
    IGNORED,
    LOSSES,
    METRICS,
    MODELS,
    ON_GPU,
    OPTIMIZERS,
    SCHEDULES,
    Features,
    data_of,
)
from tests.helpers.oracle.loop import (
    RoundResults,
    State,
    Vector,
    Visit,
    add,
    clip_vector,
    minus,
    norm,
    order,
    scale_vector,
    values,
    zeros,
)

ROUNDS, EPOCHS, SHARE, CLIP = 3, 2, 0.3, 0.15
INDEX_BYTES = 4


@dataclass
class FeatureVisit(Visit):
    """A client in a round. The first pass of a step changes the model's buffers, and its loss is noted.

    Attributes:
        losses: losses of the steps, each times its number of samples.
        samples: number of samples in all steps.
        on_gpu: random numbers are drawn as on a (stand-in for a) GPU.
    """

    losses: list[float] = field(default_factory=list)
    samples: int = 0
    on_gpu: bool = False

    def seed_pass(self) -> None:
        """See `Visit.seed_pass`."""
        if self.on_gpu:
            FakeCuda.default.manual_seed(self.seed).set_offset(self.steps * 2**20)
        else:
            super().seed_pass()

    def gradient(self, weights: Vector, x: Tensor, y: Tensor) -> Vector:
        """See `Visit.gradient`."""
        is_first = self.model.training and len(self.losses) == self.steps
        buffers = [b.clone() for b in self.model.buffers()]
        value = self.loss(weights, x, y)
        gradient = list(torch.autograd.grad(value, list(self.model.parameters())))
        if is_first:
            self.losses.append(float(value) * len(y))
            self.samples += len(y)
        else:
            set_buffers(self.model, buffers)
        return gradient


class Run:
    """A run with features.

    Args:
        active: the clients of each round.
        slices: the indices of each client's test samples.
        vectors: number of vectors that a client receives and sends, without compression.
    """

    def __init__(
        self, features: Features, active: Sequence[Sequence[int]], slices: Sequence[Any], vectors: tuple[int, int]
    ) -> None:
        self.features, self.active, self.slices, self.vectors = features, active, slices, vectors
        self.clients, self.test = data_of(features)
        kind = MODELS[features.model]
        self.model, self.loss = kind.make(), LOSSES[features.loss]
        name, options = ALGORITHMS[features.algorithm]
        self.method = getattr(oracle, name)(**options)
        self.local = [features.personal and n.startswith(kind.head) for n, _ in self.model.named_parameters()]
        self.lr, _, self.optimizer = OPTIMIZERS[features.optimizer]
        self.options = OPTIMIZERS[features.optimizer][1]
        self.errors: dict[int, Vector] = {}  # of compression
        self.velocities: dict[int, Vector] = {}  # momentum after a client's last round
        self.optimizer_states: dict[int, list[dict[str, Any]]] = {}  # state of its optimizer then, by parameter
        self.personal: dict[int, Vector] = {}  # values of local parameters
        self.states: dict[int, State] = {}
        self.starts: dict[int, Vector] = {}  # weights at the start of a client's last round
        self.ends: dict[int, Vector] = {}  # weights at its end, with the delta that was clipped
        self.history: list[dict[str, Any]] = []

    def train(self) -> nn.Module:
        """Train for all rounds, and return the final model."""
        w = values(self.model)
        self.first_weights = w
        server = self.method.start_server(w)
        with torch.random.fork_rng():
            for t in range(ROUNDS):
                w = self._round(t, server, w)
        set_weights(self.model, w)
        return self.model

    def _round(self, t: int, server: State, w: Vector) -> Vector:
        clients = self.active[t]
        lr_factor, server_lr = SCHEDULES[self.features.schedule][0](t)
        lr = self.lr * lr_factor
        sizes = {i: len(self.clients[i][1]) if self.features.weighting == "samples" else 1 for i in clients}
        share = {i: n / sum(sizes.values()) for i, n in sizes.items()}
        results = RoundResults(t, lr, server_lr, len(self.clients), share, {}, {}, self.states)
        buffers, shifts = [b.clone() for b in self.model.buffers()], {}
        losses, samples = 0.0, 0
        for i in clients:
            set_buffers(self.model, buffers)
            visit = self._visit(t, i, lr, server, w)
            delta = self._train_client(visit)
            shifts[i] = [b.double() - a.double() for a, b in zip(buffers, self.model.buffers(), strict=True)]
            losses, samples = losses + sum(visit.losses), samples + visit.samples
            set_buffers(self.model, buffers)  # a full gradient is taken at the start
            self._send(i, visit, delta, results)
        w = self.method.serve(server, w, results)
        means = [sum(share[i] * shifts[i][k] for i in clients) for k in range(len(buffers))]
        set_buffers(self.model, [_moved(b, shift) for b, shift in zip(buffers, means, strict=True)])
        record = {"lr": lr, "train_loss": losses / samples} | self._traffic(len(clients)) | self._evaluate(w)
        self.history.append(record | self._measure(w, clients))
        return w

    # --- a client ---

    def _visit(self, t: int, i: int, lr: float, server: State, w: Vector) -> FeatureVisit:
        x, y = self.clients[i]
        seed = seeds.derive(0, "client", t, i)
        momentum = 0.5 if "momentum" in self.features.optimizer else 0.0
        state = self.states.setdefault(i, self.method.start_client(w))
        visit = FeatureVisit(self.model, self.loss, x, y, t, lr, EPOCHS, seed, w, server, state, self.lr, i, momentum)
        visit.on_gpu = self.features.executor in ON_GPU
        for epoch in range(EPOCHS):
            visit.batches += order(len(y), 0, t, i, epoch, True).split(BATCH)
        return visit

    def _train_client(self, visit: FeatureVisit) -> Vector:
        """Take the local steps of a client, and return its delta."""
        self.model.train()
        self.method.begin(visit)
        origin = self._own(visit.client, self.method.origin(visit))
        w = [nn.Parameter(p.clone()) for p in origin]
        keeps, phi = self.options.get("optimizer_state") == "keep", self.method.proximal(visit.t)
        velocity = self.velocities[visit.client] if keeps and visit.client in self.velocities else zeros(origin)
        optimizer = None if self.optimizer is None else self.optimizer(w, lr=visit.lr)
        if optimizer is not None and keeps and visit.client in self.optimizer_states:
            optimizer.state = collections.defaultdict(dict, zip(w, self.optimizer_states[visit.client], strict=True))
        for indices in visit.batches:
            at = [p.detach().clone() for p in w]
            v = self.method.follow(visit, at, visit.x[indices], visit.y[indices])
            v = clip_vector(add(v, scale_vector(phi, minus(at, origin))), self.options.get("clip_norm"))
            if optimizer is None:
                v = add(v, scale_vector(self.options.get("weight_decay", 0.0), at))
                velocity = add(scale_vector(self.options.get("momentum", 0.0), velocity), v)
                _assign(w, minus(at, scale_vector(visit.lr, velocity)))
            else:
                for p, gradient in zip(w, v, strict=True):
                    p.grad = gradient
                optimizer.step()
            visit.steps += 1
        self.velocities[visit.client] = velocity
        if optimizer is not None:
            self.optimizer_states[visit.client] = [optimizer.state[p] for p in w]
        delta = minus([p.detach() for p in w], origin)
        self.starts[visit.client], self.personal[visit.client] = origin, add(origin, delta)
        if self.features.algorithm == "mimelite":  # its full gradient is at the client's start
            visit.anchor = origin
        return delta

    def _own(self, i: int, w: Vector) -> Vector:
        """Return the global weights with the local parameters of a client."""
        own = self.personal.get(i, self.first_weights)
        return [p if is_local else q for p, q, is_local in zip(own, w, self.local, strict=True)]

    def _send(self, i: int, visit: FeatureVisit, delta: Vector, results: RoundResults) -> None:
        """Add the messages of a client to the results."""
        sent = self._without_local(delta)
        if self.features.clip:
            sent = _shorten(sent)
        self.ends[i] = add(self.starts[i], [d if is_local else s for d, s, is_local in zip(delta, sent, self.local)])
        self.model.eval()
        upload = self.method.finish(visit, sent)
        if self.features.clip and "G" in upload:
            upload["G"] = _shorten(upload["G"])
        upload = {name: self._without_local(v) if isinstance(v, list) else v for name, v in upload.items()}
        if self.features.compression:
            if "direction" in upload:
                upload["direction"] = self._largest(i, upload["direction"])
            else:
                sent = self._largest(i, sent)
        results.delta[i], results.uploads[i] = sent, upload

    def _without_local(self, vector: Vector) -> Vector:
        return [torch.zeros_like(p) if is_local else p for p, is_local in zip(vector, self.local, strict=True)]

    @property
    def num_sent(self) -> int:
        """The number of parameters that a client sends."""
        return sum(p.numel() for p, is_local in zip(self.first_weights, self.local, strict=True) if not is_local)

    def _largest(self, i: int, vector: Vector) -> Vector:
        """Return the largest elements of a vector plus the client's error, and store the rest."""
        v = add(vector, self.errors.get(i, zeros(vector)))
        flat = torch.cat([p.flatten() for p in v]).abs()
        limit = flat.sort(descending=True).values[math.ceil(SHARE * self.num_sent) - 1]
        kept = [torch.where(p.abs() >= limit, p, 0.0) for p in v]
        self.errors[i] = minus(v, kept)
        return kept

    # --- the record ---

    def _traffic(self, clients: int) -> dict[str, float]:
        down, up = (8 * self.num_sent * n for n in self.vectors)
        if self.features.compression:
            up += math.ceil(SHARE * self.num_sent) * (8 + INDEX_BYTES) - 8 * self.num_sent
        buffers = 0
        if self.features.model == "batch norm":
            buffers = sum(b.nbytes for b in self.model.buffers())
        return {
            "megabytes_down": clients * (down + buffers) / 1e6, "megabytes_up": clients * (up + buffers) / 1e6,
        }  # fmt: skip

    @torch.no_grad()
    def _evaluate(self, w: Vector) -> dict[str, Any]:
        """Return the numbers of the test set, of the global model, and over the clients, of the clients' models."""
        x, y = self.test
        metrics = METRICS[self.features.metric]
        set_weights(self.model, w)
        self.model.eval()
        outputs = self.model(x)
        record: dict[str, Any] = {
            "test_loss": float(self.loss(outputs, y)),
            "test_accuracy": float((outputs.argmax(1) == y).double().mean()),
        }
        record |= {f"test_{name}": float(metric(outputs, y)) for name, metric in metrics.items()}
        columns: dict[str, list[float]] = {}
        for i, indices in enumerate(self.slices):
            if not len(indices):
                continue
            set_weights(self.model, self._own(i, w))
            outputs = self.model(x[indices])
            columns.setdefault("accuracy", []).append(float((outputs.argmax(1) == y[indices]).double().mean()))
            for name, metric in metrics.items():
                columns.setdefault(name, []).append(float(metric(outputs, y[indices])))
        return record | {f"client_{name}_mean": fmean(column) for name, column in columns.items()}

    @torch.no_grad()
    def _measure(self, w: Vector, clients: Sequence[int]) -> dict[str, float]:
        """Return the measure of the run after a round."""
        if self.features.measure == "consistency":
            return {"consistency": fmean(norm(minus(self.ends[i], w)) ** 2 for i in clients)}
        if self.features.measure == "none":
            return {}
        x, y = (torch.cat(parts) for parts in zip(*self.clients, strict=True))
        set_weights(self.model, w)
        self.model.eval()
        outputs, labelled = self.model(x), y != IGNORED
        return {
            "train_set_loss": float(self.loss(outputs, y)),
            "train_set_accuracy": float((outputs.argmax(1) == y)[labelled].double().mean()),
        }


@torch.no_grad()
def _assign(target: Sequence[Tensor], source: Vector) -> None:
    for p, value in zip(target, source, strict=True):
        p.copy_(value)


def set_weights(model: nn.Module, w: Vector) -> None:
    """Copy weights into a model."""
    _assign(list(model.parameters()), w)


def set_buffers(model: nn.Module, values: Sequence[Tensor]) -> None:
    """Copy values into the buffers of a model."""
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def _shorten(vector: Vector) -> Vector:
    """Return a vector that is no longer than CLIP. A longer one ends below CLIP, by the error of a norm in float32."""
    length = norm(vector)
    return vector if length <= CLIP else scale_vector((1 - 2**-17) * CLIP / length, vector)


def _moved(buffer: Tensor, shift: Any) -> Tensor:
    return buffer + shift if buffer.is_floating_point() else buffer + shift.round().to(buffer.dtype)
