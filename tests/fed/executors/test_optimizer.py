"""Local updates by optimizers of torch (`fed.run(optimizer=...)`), against loops in plain torch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fastsam import fed
from tests.helpers import oracle

OPTIONS = {"rounds": 3, "batch_size": 5, "participation": 1.0, "shuffle": False, "lr": 0.05, "executor": "sequential"}


def train(algorithm, optimizer, **options):
    return fed.run(
        oracle.smooth_model(), oracle.ragged_clients(), algorithm, optimizer=optimizer, **OPTIONS | options
    ).model


def twin(optimizer, rho, mu):
    """Federated averaging whose clients train with `optimizer`, with steps of SAM and a proximal term."""
    model = oracle.smooth_model()
    w = [p.detach().clone() for p in model.parameters()]
    for _ in range(OPTIONS["rounds"]):
        deltas = []
        for x, y in oracle.ragged_clients():
            parameters = list(model.parameters())
            with torch.no_grad():
                for p, start in zip(parameters, w, strict=True):
                    p.copy_(start)
            opt = optimizer(parameters)
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
                for p, g, start in zip(parameters, grads, w, strict=True):
                    p.grad = g + mu * (p.detach() - start)
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


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize(
    ("algorithm", "rho", "mu"),
    [(fed.FedAvg(), 0.0, 0.0), (fed.FedSAM(rho=0.3), 0.3, 0.0), (fed.FedProx(phi=0.2), 0.0, 0.2)],
    ids=["FedAvg", "FedSAM", "FedProx"],
)
def test_against_plain_torch(optimizer, algorithm, rho, mu):
    make = partial(optimizer, lr=0.02)
    assert oracle.difference(train(algorithm, make), twin(make, rho, mu)) < 1e-12
    assert oracle.difference(train(algorithm, make, executor="threads"), twin(make, rho, mu)) < 1e-12


def test_the_runs_learning_rate_applies_unless_the_partial_names_one():
    lr = OPTIONS["lr"]
    assert oracle.difference(train(fed.FedAvg(), "AdamW"), twin(partial(torch.optim.AdamW, lr=lr), 0.0, 0.0)) < 1e-12


def test_sgd_of_torch_is_the_kernels_sgd():
    for algorithm in (fed.SCAFFOLD(), fed.MoFedSAM(), fed.FedRep(), fed.FedNTD()):
        with_torch, with_kernels = train(algorithm, "SGD"), train(algorithm, None)
        assert oracle.difference(with_torch, with_kernels) < 1e-12, algorithm


def test_a_parameter_that_a_client_does_not_train_keeps_its_value():
    model, head = oracle.smooth_model(), fed.FedRep(head="2")
    result = fed.run(model, oracle.ragged_clients(), head, optimizer="AdamW", **OPTIONS)
    assert torch.equal(result.model[2].weight, model[2].weight)
    assert not torch.equal(result.model[0].weight, model[0].weight)
