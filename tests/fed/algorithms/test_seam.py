"""The seam: algorithms and executors that fastsam does not know, without a line changed in it."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch

from fastsam import fed
from fastsam.fed.algorithms.fedswa import Falling
from fastsam_kernels.hparams import HParam
from tests.helpers import oracle
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_runs import same_bits
from tests.helpers.fed_seam import Scaffold
from tests.promises.cases import ACTIVE, OPTIONS, run_replayed


@dataclass(frozen=True)
class Remembering(fed.Algorithm):
    """Keeps on every client the model that it received last: a reference, not a copy."""

    def finish(self, server, client, results, round):
        return {"w_old": server["w"]}, fed.Upload(mean={"delta": results.delta})


@dataclass(frozen=True)
class OwnWeights(fed.Algorithm):
    """Every client continues from its last weights, half of them with a constant perturbation.

    The model is the mean of the weights that they send.
    """

    rho: float = 0.0

    def init_client(self, server):
        return {"own": server["w"]}

    def local_step(self, server, client, round):
        start = client["own"]
        if not self.rho:
            return fed.Step(start=start)
        return fed.Shifted(rho=self.rho, e=torch.ones_like(start) * (server["w"] != 0), start=start)

    def finish(self, server, client, results, round):
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
    """A learning rate that falls in every second round. In the other rounds the rate is constant."""

    plain: fed.Step

    def local_step(self, server, client, round):
        return Falling(end=0.5) if round.index % 2 else self.plain


@pytest.mark.parametrize("executor", ["sequential", "vmap"])
def test_a_rate_that_fell_is_not_that_of_the_next_round(executor):
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    options = {"rounds": 3, "participation": 1.0, "batch_size": 3, "executor": executor}
    one, other_model = (fed.run(model, clients, Wavering(p), **options).model for p in (fed.Step(), Falling()))
    assert same_bits(one, other_model)


@dataclass(frozen=True, eq=False)
class Still(fed.SAM):
    """A step of SAM that finds, at the beginning of a round, that there is nothing to perturb."""

    def begin(self, rows, w, lr, passes):
        super().begin(rows, w, lr, passes)
        rows.column(HParam.RHO).zero_()


@dataclass(frozen=True, eq=False)
class StillFalling(Still, Falling):
    """`Still` with a learning rate that falls."""


@dataclass(frozen=True, eq=False)
class FallingSAM(fed.SAM, Falling):
    """SAM with a learning rate that falls."""


@dataclass(frozen=True)
class Unsure(fed.Algorithm):
    """SAM that perturbs in every second round."""

    usual: fed.Step
    still: fed.Step

    def local_step(self, server, client, round):
        return self.still if round.index % 2 else self.usual


@pytest.mark.parametrize(("usual", "still"), [(fed.SAM, Still), (FallingSAM, StillFalling)], ids=["plain", "falling"])
@pytest.mark.parametrize("executor", ["sequential", "vmap"])
def test_a_radius_that_was_found_is_that_of_its_round(executor, usual, still):
    model, clients = oracle.smooth_model(), oracle.ragged_clients()
    options = {"rounds": 3, "participation": 1.0, "batch_size": 3, "executor": executor}
    steps = (still(rho=0.3), usual(rho=0.0))
    one, other_model = (fed.run(model, clients, Unsure(usual(rho=0.3), s), **options).model for s in steps)
    assert same_bits(one, other_model)


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


def start_step(make):
    """Run an algorithm whose `local_step` returns `make(server)`."""
    start(algorithm_of(local_step=lambda self, server, client, round: make(server)))


def start_server(make):
    """Run an algorithm whose `step_server` returns `make(server)`."""
    start(algorithm_of(step_server=lambda self, server, aggregate, round: make(server)))


def start_finish(make):
    """Run an algorithm whose `finish` returns `make(client, delta)`."""
    start(algorithm_of(finish=lambda self, server, client, results, round: make(client, results.delta)))


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
    (lambda: start(Bare()), "init_server, init_client, local_step, finish, step_server"),
    (lambda: start(algorithm_of(local_update=lambda self, server, client, round: None)),
     "Broken.local_update is not called any more. Write local_step"),
    (lambda: start(algorithm_of(finish_client=lambda self, server, client, results, round: None)),
     "Broken.finish_client is not called any more. Write finish,"),
    (lambda: start(algorithm_of(init_server=lambda self, w0: w0)), "init_server must return a dict.*got torch.float32"),
    (lambda: start(algorithm_of(init_server=lambda self, w0: {"w": w0[:5]})), r"as 'w', .*got torch.float32 \[5\]"),
    (lambda: start(algorithm_of(init_client=lambda self, server: None)),
     "init_client must return a client's state.*got NoneType"),
    (lambda: start(algorithm_of(init_client=lambda self, server: {"k": 3})),
     "init_client must .* dict of tensors, got dict with 'k': int"),
    (lambda: start_server(lambda server: {"c": server["w"]}), "step_server must return a dict"),
    (lambda: start_server(lambda server: {"w": server["w"].double()}), "float32.*float64"),
    (lambda: start_step(lambda server: None),
     "local_step must return a fastsam.fed.Step for all 1 clients, got NoneType"),
    (lambda: start_step(lambda server: [fed.Step()]), "local_step must return a fastsam.fed.Step .*, got list"),
    (lambda: start_finish(lambda client, delta: delta), "cannot unpack|finish must return"),
    (lambda: start_finish(lambda client, delta: ({}, {"delta": delta})), "Upload.*dict"),
    (lambda: start_finish(lambda client, delta: ({"k": 3}, fed.Upload({"delta": delta}))),
     "finish .*dict with 'k': int"),
    (lambda: start_finish(lambda client, delta: (client, fed.Upload({"delta": 1.0}))),
     "Upload.mean=.*dict with 'delta': float"),
    (lambda: start_finish(lambda client, delta: (client, fed.Upload(sum=[delta]))), "Upload.sum=.*got list"),
    (lambda: start_finish(lambda client, delta: (client, fed.Upload({"delta": delta[0]}))),
     r"Upload.mean=.... of finish must have a row for each of the \d clients, \[\d, ...\]; got \[\d+\] "
     r"for 'delta'"),
    (lambda: start_finish(lambda client, delta: ({"k": delta.sum()}, fed.Upload({"delta": delta}))),
     r"the state that finish returns must have a row .* got \[\] for 'k'.* becomes rows by x.expand"),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class WritingStep(fed.Step):
    def begin(self, rows, w, lr, passes):
        super().begin(rows, w, lr, passes)
        w.add_(rows.z[0] - w)


def make_writer(where):
    """Return algorithms that write into their arguments, each in a different function."""

    def init_client(self, server):
        return {"k": torch.zeros(3)}

    def local_step(self, server, client, round):
        if where == "local_step":
            client["k"].add_(1)
        return WritingStep() if where == "begin" else fed.Step()

    def finish(self, server, client, results, round):
        if where == "finish":
            client["k"] += 1
        return client, fed.Upload({"delta": results.delta})

    def step_server(self, server, aggregate, round):
        if where == "step_server":
            server["w"].add_(aggregate.mean("delta"))
        return {"w": server["w"]}

    def train_client(self, client, server, state, round):
        for x, y in client.batches():
            client.step(x, y)
        state["k"].add_(1)

    functions = [init_client, local_step, finish, step_server] + [train_client] * (where == "train_client")
    return algorithm_of(**{function.__name__: function for function in functions})


@pytest.mark.parametrize(
    ("where", "subject"),
    [
        ("local_step", "Broken.local_step wrote into client.'k'"),
        ("begin", "WritingStep wrote into server.'w'"),
        ("train_client", "Broken.train_client wrote into client.'k'"),
        ("finish", "Broken.finish wrote into client.'k'"),
        ("step_server", "Broken.step_server wrote into server.'w'"),
        (None, ""),
    ],
)
def test_writing_into_what_was_given_is_told(where, subject):
    """New clients share one state, so such a write would change other clients."""
    arguments = (oracle.smooth_model(), oracle.ragged_clients(), make_writer(where))
    if where is None:
        fed.run(*arguments, rounds=2)
        return
    with pytest.raises(ValueError, match=f"{subject}., which is shared; it must return a new tensor"):
        fed.run(*arguments, rounds=1, executor="sequential")


def test_writing_into_the_state_of_several_new_clients_is_told():
    """They share one state, which torch does not write for several."""
    with pytest.raises((ValueError, RuntimeError), match="wrote into client|refers to a single memory location"):
        fed.run(oracle.smooth_model(), oracle.ragged_clients(), make_writer("finish"), rounds=1, participation=1.0)


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
