"""The recipes of docs/trainers.md for timm, peft and Flower, compared with the same steps in a plain loop."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM
from tests.helpers.libraries import library
from tests.helpers.sam_oracle import same_bits

BATCHES = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0))
CLIP = 0.05


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1).square().mean()


def plain_loop(model: nn.Module, opt: FusedSAM, clip: float | None = None) -> nn.Module:
    for batch in BATCHES:
        loss_of(model, batch).backward()
        opt.first_step(zero_grad=True)
        loss_of(model, batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.second_step(zero_grad=True)
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    return same_bits(list(a.parameters()), list(b.parameters()))


@pytest.mark.shows("timm", "`NativeScaler`, with and without clipping", "works")
@pytest.mark.parametrize("clip", [None, CLIP])
def test_timms_scaler(clip: float | None) -> None:
    library("timm")
    from timm.utils import NativeScaler

    expected, model = tiny_model(), tiny_model()
    plain_loop(expected, FusedSAM(expected.parameters(), rho=0.3, lr=0.1, momentum=0.9), clip)
    opt, scaler = FusedSAM(model.parameters(), rho=0.3, lr=0.1, momentum=0.9), NativeScaler(device="cpu")
    for batch in BATCHES:
        scaler(loss_of(model, batch), opt, need_update=False)
        opt.first_step(zero_grad=True)
        scaler(loss_of(model, batch), opt, clip_grad=clip, parameters=model.parameters())
        opt.zero_grad()
    assert scaler.state_dict()["scale"] > 2, "gradients were scaled"
    for weights, expected_weights in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.shows("timm", "`create_optimizer_v2` makes the base optimizer", "works")
@pytest.mark.parametrize(("name", "has_rule"), [("adamw", True), ("lamb", False)])
def test_the_base_from_timms_factory(name: str, has_rule: bool) -> None:
    library("timm")
    from timm.optim import create_optimizer_v2, get_optimizer_class, param_groups_weight_decay

    def optimizer(model: nn.Module, base: Any) -> FusedSAM:
        return FusedSAM(param_groups_weight_decay(model, weight_decay=0.05), base, rho=0.3, lr=0.01)

    model, expected = tiny_model(), tiny_model()
    opt = optimizer(model, lambda groups, **options: create_optimizer_v2(groups, name, **options))
    plain_loop(model, opt)
    plain_loop(expected, optimizer(expected, get_optimizer_class(name)))
    assert same(model, expected)
    assert (opt._engine.rule is not None) == has_rule
    assert [group["weight_decay"] for group in opt.param_groups] == [0.0, 0.05]


@pytest.mark.shows("peft", "LoRA: only the adapters are perturbed and trained", "works")
@pytest.mark.parametrize("frozen_too", [False, True])
def test_adapters_alone_move(frozen_too: bool) -> None:
    """Given to the optimizer or not: without a gradient a frozen parameter is not perturbed, nor in the norm."""
    peft = library("peft")
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(), config)
    start = copy.deepcopy(model)
    params = [p for p in model.parameters() if p.requires_grad or frozen_too]
    plain_loop(model, FusedSAM(params, torch.optim.AdamW, rho=0.3, lr=0.01))

    # By hand, with torch's optimizer: one norm over the adapters' gradients.
    expected = copy.deepcopy(start)
    adapters = [p for p in expected.parameters() if p.requires_grad]
    base = torch.optim.AdamW(adapters, lr=0.01)
    for batch in BATCHES:
        grads = torch.autograd.grad(loss_of(expected, batch), adapters)
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        old_weights = [p.detach().clone() for p in adapters]
        with torch.no_grad():
            for p, g in zip(adapters, grads):
                p.add_(0.3 * g / norm)
        second = torch.autograd.grad(loss_of(expected, batch), adapters)
        with torch.no_grad():
            for p, w, g in zip(adapters, old_weights, second):
                p.copy_(w)
                p.grad = g
        base.step()
    for weights, expected_weights, start_weights in zip(model.parameters(), expected.parameters(), start.parameters()):
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-6)
        assert weights.requires_grad or torch.equal(weights, start_weights)


@pytest.mark.shows("Flower", "`ClientApp`: local training with FusedSAM", "works")
def test_a_client_app(monkeypatch: pytest.MonkeyPatch) -> None:
    library("flwr")
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("task_id", "run_id", "node_id"):  # fields that a server would set; only its messages read them
        monkeypatch.setattr(TaskIdentity, f"_{name}", 0)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = tiny_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        opt = FusedSAM(model.parameters(), torch.optim.SGD, rho=0.3, lr=0.1)
        for batch in BATCHES:
            opt.step(lambda batch=batch: loss_of(model, batch).backward())
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(BATCHES)})}
        return Message(content=RecordDict(content), reply_to=message)

    torch.manual_seed(1)
    global_model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    expected = copy.deepcopy(global_model)
    plain_loop(expected, FusedSAM(expected.parameters(), torch.optim.SGD, rho=0.3, lr=0.1))
    content = RecordDict({"arrays": ArrayRecord(global_model.state_dict())})
    context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config={})
    reply = app(Message(content, dst_node_id=1, message_type="train"), context)
    client_model = tiny_model()
    client_model.load_state_dict(reply.content["arrays"].to_torch_state_dict())
    assert same(client_model, expected)
