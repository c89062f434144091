"""The benchmark's clients with a small BERT: the plain loop and `fed.run` take the same steps, which a device times."""

import time

import pytest
import torch

from bench.fed.workload import Workload
from tests.helpers.libraries import library, with_torchvision

with_torchvision()
library("transformers")
library("peft")
jax = library("jax")


@pytest.mark.parametrize("algorithm", ["fedavg", "fedsam"])
def test_the_plain_loop_takes_the_steps_of_a_run(algorithm: str) -> None:
    """A batch holds all samples of a client, so that no order is drawn."""
    from bench.fed import bert, jax_bert

    load = Workload("bert:120x8", algorithm, clients=3, cohort=3, sizes="unequal")
    start = bert.make_model(load)
    plain, *ours = (bert.train(load, 2, int, option) for option in ("bare", "captured", "sequential", "vmap"))
    ours.append(jax_bert.train(load, 2, int, ""))
    for name, p in plain.named_parameters():
        moved = not torch.equal(p, start.get_parameter(name))
        assert moved is p.requires_grad
        for model in ours:
            torch.testing.assert_close(model.get_parameter(name), p, rtol=1e-3, atol=2e-5)
    assert bert.loss_of(load, plain) < bert.loss_of(load, start)


def test_jax_has_the_gradients_of_torch() -> None:
    """Texts are padded, and one of the texts is padding of the batch."""
    from bench.fed import bert, jax_bert

    load = Workload("bert:8x16", clients=1)
    model = bert.make_model(load)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # biases and half of an adapter begin at zero
    batch = {name: tensor[:8] for name, tensor in bert.clients(load)[0].items()}
    assert not batch["attention_mask"].all()
    bert.LOSS(model, {name: tensor[:7] for name, tensor in batch.items()}).backward()
    x, y, _ = jax_bert.samples_of([batch], 8)
    w, frozen = (jax_bert.weights_of(model, is_trained) for is_trained in (True, False))
    gradients = jax.grad(jax_bert.loss, 1)(frozen, w, x[0], y[0], (jax.numpy.arange(8) < 7).astype(float))
    assert len(gradients) == 10
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradient = torch.tensor(gradients[jax_bert.short(name)].tolist())
            torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-6)


def test_batches_of_padding_change_no_weight_in_jax() -> None:
    from bench.fed import bert, jax_bert

    load = Workload("bert:8x16", clients=1, cohort=1)
    model = bert.make_model(load)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # else the first gradients of half of an adapter are zero
    w, frozen = (jax_bert.weights_of(model, is_trained) for is_trained in (True, False))
    batch = {name: tensor[:8] for name, tensor in bert.clients(load)[0].items()}
    x, y, sizes = jax_bert.samples_of([batch], 8)
    run, key = jax_bert.make_bert_round(load), jax.random.key(0)
    longer = (jax.numpy.pad(a, [(0, 0), (0, 16), *[(0, 0)] * (a.ndim - 2)]) for a in (x, y))
    first, second = run(frozen, w, x, y, sizes, key), run(frozen, w, *longer, sizes, key)
    for name, value in first.items():
        assert abs(value - w[name]).max() > 1e-3
        torch.testing.assert_close(*(torch.tensor(a.tolist()) for a in (value, second[name])), rtol=1e-4, atol=1e-5)


def test_a_device_times_steady_rounds_along_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point of two curves is measured once."""
    from bench.fed import on_gpu

    curves = {"width": [(32, 64, 3), (64, 64, 3)], "clients": [(32, 64, 3)], "texts in a batch": [(32, 16, 3)]}
    monkeypatch.setattr(on_gpu, "CURVES", curves)
    for contender in ("bare loop", "captured loop", "jax", "sequential", "vmap"):
        cases = list(on_gpu.measure(on_gpu.transformers("cpu", contender), time.monotonic() + 300))
        rows = {case["title"]: row for case in cases for row in case["rows"]}
        assert len(cases) == 8 and {title.rpartition(" by ")[2] for title in rows} == set(curves)
        is_ours = contender in ("sequential", "vmap")
        assert all(len(row["times"]) == 10 and row["ours"] == is_ours for row in rows.values()), rows
        assert all(("XLA's compilation" in row.get("note", "")) == (contender == "jax") for row in rows.values())
        of_width = next(case["rows"][0] for case in cases if case["rows"][0]["at"] == 32)
        assert of_width["times"] == rows["BERT with LoRA, unequal, by clients"]["times"]
