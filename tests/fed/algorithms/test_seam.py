"""The seam: algorithms and executors that fastsam does not know, without a line changed in it."""

import copy
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_cases import ACTIVE, OPTIONS, run_replayed
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_runs import same_bits
from tests.helpers.fed_seam import Scaffold


@dataclass(frozen=True)
class Remembering(fed.Algorithm):
    """Keeps on every client the model that it received last: a reference, not a copy."""

    client_vectors: ClassVar[float] = 1

    def finish_client(self, server, client, results, round):
        return {"w_old": server["w"]}, fed.Upload(mean={"delta": results.delta})


@dataclass(frozen=True)
class OwnWeights(fed.Algorithm):
    """Every client continues from its last weights, half of them with a constant perturbation.

    The model is the mean of the weights that they send.
    """

    rho: float = 0.0

    def init_client(self, server):
        return {"own": server["w"]}

    def local_update(self, server, client, round):
        start = client["own"]
        if not self.rho:
            return fed.LocalUpdate(start=start)
        offset = torch.ones_like(start) * (server["w"] != 0)
        return [
            fed.LocalUpdate(fed.Direction.CONSTANT, rho=self.rho, direction_vector=e, start=row)
            for e, row in zip(offset, start, strict=True)
        ]

    def finish_client(self, server, client, results, round):
        return {"own": client["own"] + results.delta}, fed.Upload(mean={"delta": results.delta})


def from_their_own(model, clients, rho, rounds, lr):
    """Train by autograd only: a full-batch step per round for all clients."""
    w = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    own, model_copy = [w] * len(clients), copy.deepcopy(model)
    for _ in range(rounds):
        deltas = []
        for i, (x, y) in enumerate(clients):
            offset = torch.full_like(w, rho / math.sqrt(len(w)))
            torch.nn.utils.vector_to_parameters(own[i] + offset, model_copy.parameters())
            loss = torch.nn.functional.cross_entropy(model_copy(x), y)
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model_copy.parameters()))])
            deltas.append(-lr * gradient)
            own[i] = own[i] + deltas[-1]
        w = w + sum(deltas) / len(deltas)
    return w


@pytest.mark.parametrize(
    ("executor", "rho"), [("sequential", 0.0), ("sequential", 0.3), ("threads", 0.3), ("vmap", 0.0), ("vmap", 0.3)]
)
def test_clients_start_where_they_like(executor, rho):
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    options = {"batch_size": 64, "participation": 1.0, "lr": 0.2, "executor": executor}
    final = fed.run(model, clients, OwnWeights(rho), rounds=4, **options).model
    vector = torch.nn.utils.parameters_to_vector(final.parameters()).detach()
    expected = from_their_own(model, clients, rho, 4, 0.2)
    torch.testing.assert_close(vector, expected, rtol=1e-6 if rho else 1e-12, atol=1e-12)


@dataclass(frozen=True)
class Wavering(fed.Algorithm):
    """A learning rate that falls in every second round. Only eta differs between two rounds, and plain steps ignore
    it."""

    distance: float = 0.0

    def local_update(self, server, client, round):
        return fed.LocalUpdate(lr_end_factor=0.5 if round.index % 2 else 1.0, eta=self.distance * round.index)


@pytest.mark.parametrize("executor", ["sequential", "vmap"])
def test_a_rate_that_fell_is_not_that_of_the_next_round(executor):
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    options = {"rounds": 3, "participation": 1.0, "batch_size": 3, "executor": executor}
    one, other_model = (fed.run(model, clients, Wavering(distance), **options).model for distance in (0.0, 1.0))
    assert same_bits(one, other_model)


@dataclass(frozen=True)
class Unsure(fed.Algorithm):
    """SAM whose pilots find, in every second round, that there is nothing to perturb."""

    uses_pilot: bool = True
    lr_end_factor: float = 1.0

    def local_update(self, server, client, round):
        nothing = bool(round.index % 2)
        pilot = fed.Pilot(1, lambda norms, gradients: 0 * norms) if nothing and self.uses_pilot else None
        rho = 0.0 if nothing and not self.uses_pilot else 0.3
        return fed.LocalUpdate(fed.Direction.GRADIENT, rho=rho, pilot=pilot, lr_end_factor=self.lr_end_factor)


@pytest.mark.parametrize("lr_end_factor", [1.0, 0.5])
@pytest.mark.parametrize("executor", ["sequential", "vmap"])
def test_a_radius_that_pilots_found_is_that_of_its_round(executor, lr_end_factor):
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    options = {"rounds": 3, "participation": 1.0, "batch_size": 3, "executor": executor}
    one, other_model = (fed.run(model, clients, Unsure(p, lr_end_factor), **options).model for p in (True, False))
    assert same_bits(one, other_model)


@pytest.mark.parametrize("executor", ["sequential", "vmap"])
@pytest.mark.parametrize(
    ("radius", "got"), [(lambda h, g: h[:, None], r"\[\d, 1\]"), (lambda h, g: 0.1, "float")], ids=["column", "number"]
)
def test_a_radius_of_pilots_is_a_number_for_each_client(executor, radius, got):
    class Wrong(fed.Algorithm):
        def local_update(self, server, client, round):
            return fed.LocalUpdate(fed.Direction.GRADIENT, pilot=fed.Pilot(1, radius))

    with pytest.raises(ValueError, match=f"radius must return a tensor with a number for each client, .*got {got}"):
        fed.run(oracle.smooth_model(), oracle.ragged_clients(), Wrong(), rounds=1, executor=executor)


@pytest.mark.parametrize("rho", [None, 0.2])
@pytest.mark.parametrize("options", ["plain", "decay", "momentum", "clip-active"])
def test_control_variates(options, rho):
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    result = run_replayed(model, clients, Scaffold(rho=rho), OPTIONS[options])
    twin = oracle.SCAFFOLD() if rho is None else oracle.FedGAMMA(rho)
    twin_weights = oracle.run(model, clients, twin, OPTIONS[options], ACTIVE)
    assert oracle.difference(result.model, twin_weights) < 1e-12
    # 2 clients, 2 vectors of 73 float64
    assert result.history[0]["megabytes_down"] == pytest.approx(2 * 2 * 73 * 8 / 1e6)


def test_a_shared_tensor_is_stored_once(tmp_path):
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    fed.run(model, clients, Remembering(), rounds=1, participation=1.0, run_dir=tmp_path / "run")
    server, states = (next((tmp_path / "run" / "checkpoint").glob(f"{n}-*.safetensors")) for n in ("server", "clients"))
    assert states.stat().st_size < 1.5 * server.stat().st_size  # five clients, one past model


class Bare:
    down = up = 1


def algorithm_of(**methods):
    return type("Broken", (fed.Algorithm,), methods)()


def start(algorithm):
    fed.run(oracle.smooth_model(torch.float32), oracle.ragged_clients(torch.float32), algorithm, rounds=1)


def start_update(make):
    """Run an algorithm whose `local_update` returns `make(server)`."""
    start(algorithm_of(local_update=lambda self, server, client, round: make(server)))


def start_step(make):
    start(algorithm_of(step_server=lambda self, server, aggregate, round: make(server)))


def start_finish(make):
    """Run an algorithm whose `finish_client` returns `make(client, delta)`."""
    start(algorithm_of(finish_client=lambda self, server, client, results, round: make(client, results.delta)))


def dot_of(change):
    """Run an algorithm that multiplies a vector of the server with the mean of the deltas, after `change`."""

    def step_server(self, server, aggregate, round):
        change(server["w"], aggregate.mean("delta"))
        return server

    start(algorithm_of(step_server=step_server))


test_refused = refusals(
    (lambda: dot_of(torch.dot),
     r"Broken.step_server failed in round 1: RuntimeError: .*Means and sums of an aggregate are float64. Write "
     r"server\['w'\].double\(\), or aggregate.mean\(name\).to\(server\['w'\].dtype\)", fed.AlgorithmError),
    (lambda: dot_of(lambda w, mean: torch.lerp(w, mean, 0.5)), "aggregate are float64", fed.AlgorithmError),
    (lambda: dot_of(lambda w, mean: w[None] @ mean), "aggregate are float64", fed.AlgorithmError),
    (lambda: start(fed.FedSAM), r"FedSAM\(\.\.\.\), not FedSAM"),
    (lambda: start(Bare()), "init_server, init_client"),
    (lambda: start(algorithm_of(init_server=lambda self, w0: w0)), "init_server must return a dict.*Tensor"),
    (lambda: start(algorithm_of(init_server=lambda self, w0: {"w": w0[:5]})), r"init_server must return 'w'.*\[5\]"),
    (lambda: start(algorithm_of(init_client=lambda self, server: None)),
     "init_client must return a client's state.*got NoneType"),
    (lambda: start(algorithm_of(init_client=lambda self, server: {"k": 3})),
     "init_client must .* dict of tensors, got dict with 'k': int"),
    (lambda: start_step(lambda server: {"c": server["w"]}), "step_server must return a dict"),
    (lambda: start_step(lambda server: {"w": server["w"].double()}), "float32.*float64"),
    (lambda: start_update(lambda server: fed.LocalUpdate(gradient_offset=torch.zeros(3))),
     r"LocalUpdate.gradient_offset must be.*\[3\]"),
    (lambda: start_update(lambda server: fed.LocalUpdate(gradient_offset=0.1)),
     "LocalUpdate.gradient_offset must be.*got float"),
    (lambda: start_update(lambda server: fed.LocalUpdate(start=server["w"][:-1])), "LocalUpdate.start"),
    (lambda: start_update(lambda server: None),
     r"must return a fastsam.fed.LocalUpdate \(or a list of 1, one for each client\), got NoneType"),
    (lambda: start_update(lambda server: [fed.LocalUpdate()] * 2),
     "must return a fastsam.fed.LocalUpdate .*, got 2 times LocalUpdate"),
    (lambda: start_update(lambda server: fed.LocalUpdate(gradient_offset=server["w"].expand(2, -1))),
     r"LocalUpdate.gradient_offset must be torch.float32 \[1, \d+\] \(or \[\d+\], one for all 1 clients\).*"
     r"got torch.float32 \[2,"),
    (lambda: start_finish(lambda client, delta: delta), "cannot unpack|finish_client must return"),
    (lambda: start_finish(lambda client, delta: ({}, {"delta": delta})), "Upload.*dict"),
    (lambda: start_finish(lambda client, delta: ({"k": 3}, fed.Upload({"delta": delta}))),
     "finish_client .*dict with 'k': int"),
    (lambda: start_finish(lambda client, delta: (client, fed.Upload({"delta": 1.0}))),
     "Upload.mean=.*dict with 'delta': float"),
    (lambda: start_finish(lambda client, delta: (client, fed.Upload(sum=[delta]))), "Upload.sum=.*got list"),
    (lambda: start_finish(lambda client, delta: (client, fed.Upload({"delta": delta[0]}))),
     r"Upload.mean=.... of finish_client must have a row for each of the \d clients, \[\d, ...\]; got \[\d+\] "
     r"for 'delta'"),
    (lambda: start_finish(lambda client, delta: ({"k": delta.sum()}, fed.Upload({"delta": delta}))),
     r"the state that finish_client returns must have a row .* got \[\] for 'k'.* becomes rows by x.expand"),
)  # fmt: skip


def make_writer(where):
    """Return algorithms that write into their arguments, each in a different function."""

    def init_client(self, server):
        return {"k": torch.zeros(3)}

    def local_update(self, server, client, round):
        if where == "local_update":
            client["k"].add_(1)
        return fed.LocalUpdate()

    def finish_client(self, server, client, results, round):
        if where == "finish_client":
            client["k"] += 1
        return client, fed.Upload({"delta": results.delta})

    def step_server(self, server, aggregate, round):
        if where == "step_server":
            server["w"].add_(aggregate.mean("delta"))
        return {"w": server["w"]}

    functions = (init_client, local_update, finish_client, step_server)
    return algorithm_of(**{function.__name__: function for function in functions})


@pytest.mark.parametrize(
    ("where", "subject"),
    [("local_update", "client.'k'"), ("finish_client", "client.'k'"), ("step_server", "server.'w'"), (None, "")],
)
def test_writing_into_what_was_given_is_told(where, subject):
    """New clients share one state, so such a write would change other clients."""
    arguments = (oracle.smooth_model(), oracle.ragged_clients(), make_writer(where))
    if where is None:
        fed.run(*arguments, rounds=2)
        return
    with pytest.raises(ValueError, match=f"wrote into {subject}., which is shared; it must return a new tensor"):
        fed.run(*arguments, rounds=1, executor="sequential")


def test_writing_into_the_state_of_several_clients_is_told():
    """In the first round all have one state, which torch does not write for several; later each has its own."""
    with pytest.raises((ValueError, RuntimeError), match="wrote into client|refers to a single memory location"):
        fed.run(
            oracle.smooth_model(), oracle.ragged_clients(), make_writer("finish_client"), rounds=1, participation=1.0
        )

    def finish_client(self, server, client, results, round):
        if round.index:
            client["k"].add_(1)
        return {"k": results.delta}, fed.Upload({"delta": results.delta})

    options = {"rounds": 2, "participation": 1.0, "executor": "vmap", "slots": 8}
    with pytest.raises(ValueError, match="wrote into client.'k'., which is shared; it must return a new tensor"):
        clients = [oracle.ragged_clients()[0]] * 4
        fed.run(oracle.smooth_model(), clients, algorithm_of(finish_client=finish_client), **options)


def test_a_global_model_that_is_not_finite_ends_the_run(tmp_path):
    """The round before remains, from which a run with a smaller server_lr could go on."""
    broke = algorithm_of(step_server=lambda self, server, aggregate, round: {"w": server["w"] / (1 - round.index)})
    with pytest.raises(RuntimeError, match="round 2: the global model holds NaN or infinity after the server's step"):
        fed.run(oracle.smooth_model(), oracle.ragged_clients(), broke, rounds=3, run_dir=tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_sum_that_nobody_sent_is_named():
    def step_server(self, server, aggregate, round):
        return {"w": server["w"] + aggregate.mean("velocity")}

    with pytest.raises(fed.AlgorithmError, match="step_server failed in round 1: KeyError: .*'velocity'.*'delta'"):
        start(algorithm_of(step_server=step_server))
