"""Models whose forward pass writes parameters and buffers: writes that count, and writes that are refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import fed
from fastsam.fed.update.tensor_guard import TensorGuard
from tests.helpers import oracle
from tests.helpers.fed_refusals import refusals
from tests.helpers.fed_runs import vector

RHO, LR, BATCH, ROUNDS = 0.5, 0.3, 4, 3
CLIENTS = oracle.ragged_clients(sizes=(9, 14, 6), seed=2)
TEST = oracle.ragged_clients(sizes=(11,), seed=5)[0]
WORDS = torch.arange(48).view(8, 6) % 7  # inputs of a model with an embedding


class Cosine(nn.Module):
    """A classifier that writes its weight in each forward pass."""

    def __init__(self, write: Callable[[nn.Parameter], None], is_training_only: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.is_training_only = write, is_training_only
        self.body, self.head = nn.Linear(6, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.training or not self.is_training_only:
            self.write(self.head.weight)
        output: Tensor = self.head(torch.tanh(self.body(x)))
        return output


class Words(nn.Module):
    """An embedding whose rows are renormalised when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(7, 5, max_norm=0.8).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.words((7 * x.sigmoid()).long()).mean(1))
        return output


@torch.no_grad()
def normalise(w: nn.Parameter) -> None:
    w.copy_(F.normalize(w))


@torch.no_grad()
def decay(w: nn.Parameter) -> None:
    """Write another weight in each pass, so that a second write of a step would show."""
    w.mul_(0.9)


def clamp_data(w: nn.Parameter) -> None:
    """Write nothing before the weights have grown, and without a trace in the version counter."""
    w.data.clamp_(-0.45, 0.45)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "normalised": lambda: Cosine(normalise),
    "decayed": lambda: Cosine(decay, is_training_only=True),
    "clamped": lambda: Cosine(clamp_data),
    "max_norm": Words,
}


def plain_loop(model: nn.Module, rho: float) -> nn.Module:
    """Return the model after FedSAM (FedAvg if `rho` is 0) in plain torch. A write in the first pass of a step counts,
    and a write at perturbed weights is restored with the weights."""
    model = copy.deepcopy(model).train()
    for _ in range(ROUNDS):
        ends = []
        for x, y in CLIENTS:
            local = copy.deepcopy(model)
            for batch in zip(x.split(BATCH), y.split(BATCH), strict=True):
                _plain_step(local, *batch, rho)
            ends.append(vector(local))
        nn.utils.vector_to_parameters(torch.stack(ends).mean(0), model.parameters())
    return model


def _plain_step(model: nn.Module, x: Tensor, y: Tensor, rho: float) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
    with torch.no_grad():
        weights = [p.clone() for p in parameters]
        if rho:
            norm = torch.cat([g.flatten() for g in gradients]).norm() + 1e-7
            for p, g in zip(parameters, gradients, strict=True):
                p.add_(rho / norm * g)
            with torch.enable_grad():
                gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
        for p, w, g in zip(parameters, weights, gradients, strict=True):
            p.copy_(w - LR * g)


def run(model: nn.Module, algorithm: fed.Algorithm | None = None, **options: Any) -> fed.Result:
    common: dict[str, Any] = {
        "rounds": ROUNDS, "participation": 1.0, "batch_size": BATCH, "lr": LR, "shuffle": False, "test": TEST,
        "executor": "sequential",
    }  # fmt: skip
    clients = options.pop("clients", CLIENTS)
    return fed.run(model, clients, algorithm or fed.FedAvg(), **common | options)


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("rho", [0.0, RHO])
@pytest.mark.parametrize("name", MODELS)
def test_a_write_in_place_has_the_meaning_of_a_plain_loop(name: str, rho: float, executor: str) -> None:
    model = MODELS[name]()
    start = vector(model)
    result = run(model, fed.FedSAM(rho=rho) if rho else fed.FedAvg(), executor=executor)
    expected = plain_loop(model, rho)
    assert torch.allclose(vector(result.model), vector(expected), rtol=0, atol=1e-12)
    assert torch.equal(vector(model), start)
    weights = vector(result.model)
    loss = F.cross_entropy(copy.deepcopy(result.model).eval()(TEST[0]), TEST[1]).item()
    assert result.history[-1]["test_loss"] == pytest.approx(loss, rel=1e-12)
    assert torch.equal(vector(result.model), weights)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("executor", ["streams", "graph"])
@pytest.mark.parametrize("name", ["normalised", "decayed"])
def test_lanes_have_the_bits_of_the_plain_executor(name: str, executor: str) -> None:
    plain, lanes = (run(MODELS[name](), fed.FedSAM(rho=RHO), executor=one) for one in ("sequential", executor))
    assert torch.equal(vector(lanes.model), vector(plain.model))


def assign_data(w: nn.Parameter) -> None:
    w.data = F.normalize(w.data)


MOVED = r"gives the parameter 'head.weight' other memory .* under torch.no_grad\(\): self.head.weight.copy_\(new\)"


@pytest.mark.parametrize("executor", ["sequential", "threads", "vmap"])
def test_a_parameter_with_other_memory_is_refused_by_name(executor: str, tmp_path: Path) -> None:
    for algorithm in (fed.FedAvg(), fed.FedSAM(rho=RHO)):
        with pytest.raises(ValueError, match=MOVED):
            run(Cosine(assign_data), algorithm, executor=executor, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Evaluated(Cosine):
    """Gives its weight other memory only in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            assign_data(self.head.weight)
        output: Tensor = self.head(torch.tanh(self.body(x)))
        return output


def test_no_tensor_gets_the_address_of_a_replaced_parameter() -> None:
    """A second replacement would look like no replacement."""
    module = nn.Linear(40, 40)
    guard, address = TensorGuard(module), module.weight.data_ptr()
    module.weight.data = module.weight.data * 2
    assert address not in {t.data_ptr() for t in [torch.empty(40, 40) for _ in range(2000)]}
    assert "'weight' other memory" in str(guard.find_problem(has_fixed_buffers=False))


test_refused = refusals(
    (lambda: run(Evaluated(normalise), run_dir="run"), f"in evaluation mode a pass {MOVED}"),
    (lambda: run(Cosine(normalise), executor="vmap", run_dir="run"),
     "executor 'vmap' cannot serve here: a forward pass writes trained parameters in place"),
    *((lambda algorithm=algorithm: run(Cosine(normalise), algorithm, run_dir="run"),
       rf"the step of {type(algorithm).__name__}.local_step, failed: a forward pass writes trained .*FedSAM, say$")
      for algorithm in (fed.FedLESAM(), fed.FedWMSAM(), fed.MimeLite(), fed.FedSCAM())),
    (lambda: run(Cosine(normalise), fed.Ditto(), run_dir="run"),
     "the parameter 'head.weight', .* needs local steps .*, but Ditto has phases or models of its own.* or FedSAM"),
    (lambda: run(Cosine(normalise), fed.FedLESAM(initial_perturbation="none")),  # a plain first round
     "client 0 failed in round 2, local step 0: .* writes trained parameters in place, and the step has passes at "
     "perturbed weights first", fed.ClientError),
)  # fmt: skip


# --- Buffers and frozen parameters that change only in some passes: the trial before round 1 may not see it.

PEAK = 1.7  # which some batches reach, and the batch of the trial does not
assert CLIENTS[1][0][:BATCH].max() < PEAK < min(x.max() for x, _ in CLIENTS)


class Seldom(nn.Module):
    """Changes a tensor in the passes on batches with a large number, or on small ones."""

    def __init__(self, mode: str, is_of_small: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mode, self.is_of_small = mode, is_of_small
        self.online, self.target = nn.Linear(6, 3).double(), nn.Linear(6, 3).double().requires_grad_(False)
        self.register_buffer("peak", torch.ones((), dtype=torch.float64))
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and (len(x) < BATCH if self.is_of_small else bool(x.max() > PEAK)):
            self.change(x)
        output: Tensor = (self.online(x) + self.target(x)) / self.peak
        return output

    @torch.no_grad()
    def change(self, x: Tensor) -> None:
        if self.mode == "assigned buffer":
            self.peak = x.max()
        elif self.mode == "new buffer":
            self.cache = x.max()
        elif self.mode == "written buffer":
            self.peak.copy_(torch.maximum(self.peak, x.max()))
        elif self.mode == "copied target":
            self.target.load_state_dict(self.online.state_dict())
        elif self.mode == "assigned target":
            self.target.weight.data = self.online.weight.data.clone()
        elif self.mode == "new target":
            self.target.weight = nn.Parameter(self.online.weight.clone(), requires_grad=False)


CHANGES = {
    "assigned buffer": r"replaces the buffer 'peak' .*self.peak.copy_\(new\)",
    "new buffer": r"replaces the buffer 'cache' .* Register it with its shape",
    "written buffer": r"change.* buffer.* \W?peak.* Say buffers='average'",
    "copied target": r"writes the parameter 'target.(weight|bias)', which is not trained .*register_buffer",
    "assigned target": "gives the parameter 'target.weight' other memory",
    "new target": "gives the parameter 'target.weight' other memory",
}


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("mode", CHANGES)
def test_a_change_in_some_passes_is_an_error_that_names_the_tensor(mode: str, executor: str) -> None:
    model = Seldom(mode)
    old_state = {name: t.clone() for name, t in model.state_dict().items()}
    options = {"executor": executor, "on_client_error": "exclude"}
    with pytest.raises(fed.ClientError, match=f"client . failed in round 1, local step ..*{CHANGES[mode]}"):
        run(model, **options)
    assert model.cache is None
    assert all(torch.equal(t, old_state[name]) for name, t in model.state_dict().items())
    assert model.target.weight.grad is None


@pytest.mark.parametrize("mode", CHANGES)
def test_a_change_in_small_batches_is_found_before_round_1(mode: str) -> None:
    with pytest.raises(ValueError, match=CHANGES[mode]):
        run(Seldom(mode, is_of_small=True))


def plain_average() -> Seldom:
    """Return the model after FedAvg with the mean of the clients' buffers."""
    model = Seldom("written buffer").train()
    for _ in range(ROUNDS):
        ends, peaks = [], []
        for x, y in CLIENTS:
            local = copy.deepcopy(model)
            for a, b in zip(x.split(BATCH), y.split(BATCH), strict=True):
                gradients = torch.autograd.grad(F.cross_entropy(local(a), b), list(local.online.parameters()))
                with torch.no_grad():
                    for p, g in zip(local.online.parameters(), gradients, strict=True):
                        p.sub_(LR * g)
            ends.append(vector(local.online))
            peaks.append(local.peak)
        nn.utils.vector_to_parameters(torch.stack(ends).mean(0), model.online.parameters())
        model.peak = torch.stack(peaks).mean()
    return model


@pytest.mark.parametrize("executor", ["sequential", "threads"])
def test_a_written_buffer_is_served_as_the_run_says(executor: str) -> None:
    average, expected = run(Seldom("written buffer"), buffers="average", executor=executor), plain_average()
    assert expected.peak > 1
    assert average.model.peak.item() == pytest.approx(expected.peak.item(), rel=1e-12)
    assert torch.allclose(vector(average.model), vector(expected), rtol=0, atol=1e-12)
    kept = run(Seldom("written buffer"), buffers="keep", executor=executor)
    assert kept.model.peak == 1
    local = run(Seldom("written buffer"), buffers="local", executor=executor)
    assert all(local.client_model(i).peak == CLIENTS[i][0].max() for i in range(len(CLIENTS)))


def test_stacked_clients_share_their_buffers() -> None:
    """`vmap` serves no buffer that changes. A counter changes without a trace in the numbers."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training and len(x) == 2:
                self.count.add_(1)
            return super().forward(x)

    clients = oracle.ragged_clients(torch.float32, sizes=(9, 14, 6))
    with pytest.raises(fed.ClientError, match="changes the buffer 'count', .* executor='threads' or 'sequential'"):
        run(Counting(), executor="vmap", clients=clients, buffers="keep", test=None)
