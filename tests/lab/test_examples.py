"""The examples run unchanged, and their files work with the command line."""

import contextlib
import copy
import io
import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from torch import Tensor, nn

from fastsam import SAM, FusedSAM, fed, variants
from fastsam.fed import models
from fastsam.lab import cli, compare, config, experiment
from fastsam.lab.import_paths import import_object
from tests.helpers.places import ROOT

EXAMPLES = ROOT / "examples"


def run(name: str) -> str:
    """Return the output of the example."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return output.getvalue()


def test_own_data_learns() -> None:
    accuracy = re.search(r"test accuracy (0\.\d+)", run("own_data.py"))
    assert accuracy is not None and float(accuracy.group(1)) > 0.9


def test_own_algorithm_runs() -> None:
    assert re.search(r"FedAvgM after \d+ rounds: \d+\.\d % test accuracy", run("own_algorithm.py"))


def test_own_algorithm_is_fedavgm() -> None:
    own_class = import_object(f"{EXAMPLES / 'own_algorithm.py'}:FedAvgM", "algorithm")
    torch.manual_seed(0)
    clients = [(torch.randn(12, 5, dtype=torch.float64), torch.arange(12) % 3) for _ in range(2)]
    model = models.build("mlp", (5,), 3, seed=1, hidden=[4]).double()
    settings = {"local_epochs": 2, "batch_size": 4, "lr": 0.3, "participation": 1.0, "server_lr": 0.5}
    ends = [fed.run(model, clients, kind(beta=0.7), rounds=3, **settings).model for kind in (own_class, fed.FedAvgM)]
    for a, b in zip(*(end.parameters() for end in ends), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_the_commands_in_the_examples_work(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)  # runs/ must not land in the checkout
    assert cli.main(["run", "examples/own_data.toml", "--rounds", "2"]) == 0
    algorithm = "examples/own_algorithm.py:FedAvgM"
    assert cli.main(["run", "examples/digits.toml", "--algorithm", algorithm, "--beta", "0.2", "--rounds", "1"]) == 0
    flags = ["--rounds", "1", "--clients", "5", "--fedavgm.beta", "0.3"]
    assert cli.main(["compare", "examples/digits.toml", "--algorithms", f"fedavg,{algorithm}", *flags]) == 0
    assert re.search(r"^ *FedAvgM +\d", capsys.readouterr().out, re.M)
    assert (tmp_path / "runs" / "digits-compare-001" / "fedavgm-seed0" / "summary.json").exists()


def test_the_private_example_runs_fedsam_with_noise(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    pytest.importorskip("dp_accounting", reason="epsilon needs dp-accounting: pip install 'fused-sam[privacy]'")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", str(EXAMPLES / "private.toml"), "--rounds", "2", "--run-dir", "run"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["algorithm"] == "FedSAM" and 2 < summary["privacy"]["epsilon"] < 10
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["delta"] for record in records] == [1e-3, 1e-3]


def test_the_demo_is_what_it_says_it_is() -> None:
    plan = compare.plan(config.read(EXAMPLES / "showcase.toml"), None)
    data = experiment.load_data(plan.configs[0])
    assert (len(data), data.name, plan.configs[0].split, plan.configs[0].alpha) == (50, "digits", "dirichlet", 0.1)
    family = {"fedavg", "fedsam", "mofedsam", "fedlesam-d", "fedsmoo"}
    assert len(plan.configs) == 40 and {c.algorithm for c in plan.configs} == family


def test_fused_sam_learns() -> None:
    accuracy = re.search(r"test accuracy (0\.\d+)", run("fused_sam.py"))
    assert accuracy is not None and float(accuracy.group(1)) > 0.95


@pytest.mark.parametrize("method", ["sgd", "sam", "msam", "late"])
def test_cifar_trains_on_made_up_images(method: str) -> None:
    """A bright or a dark half tells the classes apart; after training, the weights are those of evaluation."""
    example = runpy.run_path(str(EXAMPLES / "cifar.py"))
    torch.manual_seed(0)
    y = torch.arange(48) % 2
    x = 0.1 * torch.randn(48, 3, 32, 32) + (2.0 * y - 1)[:, None, None, None]
    model = example["wide_resnet"](2, depth=10, factor=1)
    example["train"](model, x, y, method, rho=0.01, epochs=3, batch=8, seed=0)
    assert example["accuracy"](model, x, y) > 0.95


def test_cifar_has_its_two_models() -> None:
    models = runpy.run_path(str(EXAMPLES / "cifar.py"))["MODELS"]
    sizes = {name: sum(p.numel() for p in make(10).parameters()) for name, make in models.items() if name == "wrn"}
    assert sizes == {"wrn": 36_479_194}  # the 36.5 M of the paper


@pytest.fixture
def one_after_the_other(monkeypatch: MonkeyPatch) -> None:
    """Train clients one by one, so that no passes are recorded for these few rounds."""
    train = fed.run
    monkeypatch.setattr(fed, "run", lambda *args, **options: train(*args, **options, executor="sequential"))


def test_text_is_padded_and_learnt(one_after_the_other: None) -> None:
    result = runpy.run_path(str(EXAMPLES / "text.py"))["train"](rounds=4)
    losses = [line["test_loss"] for line in result.history]
    assert losses[-1] < losses[0] - 0.05 and result.history[-1]["test_accuracy"] > 0.3
    assert result.history[-1]["client_accuracy_std"] > 0


def test_functional_sam_keeps_the_gradient_of_the_outputs() -> None:
    """The gradient of the update is `J(w + e)^T dL/dF(w)`, here by the derivatives of single outputs."""
    example = runpy.run_path(str(EXAMPLES / "functional_sam.py"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5)).double()
    inputs, targets = torch.randn(2, 3, 4, dtype=torch.float64), torch.randint(5, (2, 3))
    params, old_weights = dict(model.named_parameters()), {n: p.detach().clone() for n, p in model.named_parameters()}

    def call(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, inputs).flatten(0, 1)

    outputs = call(old_weights)
    output_grads = (outputs.softmax(1) - nn.functional.one_hot(targets.flatten(), 5)) / len(outputs)

    def product(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: torch.tensordot(output_grads, j, 2) for n, j in torch.func.jacrev(call)(weights).items()}

    g1 = product(old_weights)
    norm = torch.stack([g.square().sum() for g in g1.values()]).sum().sqrt()
    g2 = product({n: w + 0.5 * g1[n] / norm for n, w in old_weights.items()})
    loss = example["step"](FusedSAM(list(params.values()), lr=0.1, rho=0.5), model, inputs, targets)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(outputs, targets.flatten()))
    for name, weight in params.items():
        torch.testing.assert_close(weight.detach(), old_weights[name] - 0.1 * g2[name])
    assert (g2["0.weight"] - g1["0.weight"]).abs().max() > 1e-3


def test_functional_sam_learns() -> None:
    train = runpy.run_path(str(EXAMPLES / "functional_sam.py"))["train"]
    assert train(variants.PreconditionedSAM(rho=0.1), True, steps=60) < 2.0 < train(SAM(), True, steps=2)


class Adapter(nn.Module):
    """The names that peft gives a layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(5, 3).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(5, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 3, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))
        return result

    def effective(self) -> tuple[Tensor, Tensor]:
        """Return the weights of the layer with its adapter, and the weights of the adapter."""
        b, a = self.lora_B["default"].weight, self.lora_A["default"].weight
        return (self.base_layer.weight + 2 * b @ a).detach(), (2 * b @ a).detach()


@pytest.mark.parametrize("rho", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_the_average_of_fedex_lora_is_exact(rho: float, optimizer: str) -> None:
    """`W + scale * mean(B_i A_i)`, with the adapters of clients that train alone."""
    example = runpy.run_path(str(EXAMPLES / "lora.py"))
    torch.manual_seed(0)
    x, y = torch.randn(3, 8, 5, dtype=torch.float64), torch.arange(24).reshape(3, 8) % 3
    clients = list(zip(x, y, strict=True))
    model = Adapter().double()
    settings = {"rounds": 1, "lr": 0.1, "participation": 1.0, "shuffle": False, "batch_size": 4, "optimizer": optimizer}
    plain = fed.FedSAM(rho=rho) if rho else fed.FedAvg()
    alone = [fed.run(model, [client], plain, executor="sequential", **settings).model for client in clients]
    exact = model.base_layer.weight + torch.stack([end.effective()[1] for end in alone]).mean(0)
    moved = example["move_by_server"](copy.deepcopy(model))
    for executor in ("sequential", "vmap"):
        result = fed.run(moved, clients, example["FedExLoRA"](rho=rho), executor=executor, **settings).model
        torch.testing.assert_close(result.effective()[0], exact, rtol=1e-12, atol=1e-14)
    averaged = fed.run(model, clients, plain, executor="sequential", **settings).model
    assert (averaged.effective()[0] - exact).abs().max() > 1e-4
