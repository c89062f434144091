"""Algorithms whose clients have models of their own, beside loops in plain torch (`oracle.personal`): the shared model and every client's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_cases import ACTIVE, replayed
from tests.helpers.fed_runs import same_bits
from tests.helpers.mutants.apply import replaced
from tests.helpers.oracle import personal as unfused

OPTIONS = oracle.Options(rounds=5, momentum=0.5, weight_decay=0.02, server_lr=0.7, shuffle=True, seed=3, epochs=2)
SIZES = (8, 12, 5, 9, 23)  # of batches of 6 none ends with one sample, which BatchNorm could not train on
TEST = oracle.ragged_clients(sizes=(60,), seed=5)[0]


def normalised(batch: bool = True) -> nn.Module:
    """A layer, a normalisation, a layer; float64."""
    torch.manual_seed(1)
    layer = nn.BatchNorm1d(7) if batch else nn.LayerNorm(7)
    return nn.Sequential(nn.Linear(6, 7), layer, nn.Tanh(), nn.Linear(7, 3)).double()


def apart(a: nn.Module, b: nn.Module) -> float:
    """Largest difference of two models' parameters and buffers."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max((p.double() - q.double()).abs().max().item() for p, q in pairs)


def batch_of(options: oracle.Options, batch: int) -> oracle.Options:
    return oracle.Options(**{**vars(options), "batch": batch})


def furthest(result: fed.Result, wanted: unfused.Ended) -> float:
    """Over the shared model and those of all clients."""
    shared, own = wanted
    found = [apart(result.client_model(i), model) for i, model in enumerate(own)]
    return max([apart(result.model, shared), *found])


def ran(model: nn.Module, algorithm: Any, options: oracle.Options = OPTIONS, **more: Any) -> fed.Result:
    return replayed(model, oracle.ragged_clients(sizes=SIZES), algorithm, options, ACTIVE, **more)


# --- FedBN


def fedbn_case(batch: bool = True) -> tuple[nn.Module, unfused.Ended]:
    model = normalised(batch)
    return model, unfused.fedbn(model, oracle.ragged_clients(sizes=SIZES), batch_of(OPTIONS, 6), ACTIVE, ["1"])


@pytest.mark.parametrize("batch", [True, False], ids=["BatchNorm", "LayerNorm"])
def test_fedbn_against_a_plain_loop(batch):
    model, wanted = fedbn_case(batch)
    result = ran(model, fed.FedBN(), batch_of(OPTIONS, 6))
    assert furthest(result, wanted) < 1e-12
    assert apart(result.client_model(0), result.client_model(1)) > 1e-2
    assert apart(result.model[1], model[1]) == 0, "the shared model has the layers of the start"


def test_fedbn_is_two_options_of_a_run():
    model = normalised()
    options = batch_of(OPTIONS, 6)
    one = ran(model, fed.FedBN(), options)
    other = ran(model, fed.FedAvg(), options, personal="1", buffers="local")
    assert all(apart(one.client_model(i), other.client_model(i)) == 0 for i in range(5))
    assert {k: v for k, v in one.history[-1].items() if "seconds" not in k} == {
        k: v for k, v in other.history[-1].items() if "seconds" not in k
    }


def test_buffers_alone_may_stay():
    """Every parameter is averaged, the statistics are each client's own: beside a run whose buffers are averaged, its parameters."""
    options = batch_of(OPTIONS, 6)
    local, averaged = (ran(normalised(), fed.FedSAM(), options, buffers=kind) for kind in ("local", "average"))
    assert same_bits(local.model, averaged.model), "in training a batch is normalised by its own statistics"
    own = local.client_model(3)
    assert same_bits(own, local.model) and apart(own[1], averaged.model[1]) > 1e-2
    assert apart(own[1], local.client_model(0)[1]) > 1e-2
    assert own[1].num_batches_tracked == 2 * 2 * sum(3 in active for active in ACTIVE[:5])


def test_accuracies_are_those_of_the_clients_models_with_their_buffers():
    options = oracle.Options(**{**vars(batch_of(OPTIONS, 6)), "shuffle": False})
    result = ran(normalised(), fed.FedBN(), options, test=TEST, validation="shared", personalise=2)
    models = [result.client_model(i).eval() for i in range(5)]
    found = [(model(TEST[0]).argmax(1) == TEST[1]).double().mean().item() for model in models]
    assert result.history[-1]["client_accuracy_mean"] == pytest.approx(sum(found) / 5)
    assert [one["before"] for one in result.personal] == pytest.approx(found)
    assert len(set(found)) > 1
    for i, (x, y) in enumerate(oracle.ragged_clients(sizes=SIZES)):
        alone, lr = {**options.keywords(), "rounds": 1, "server_lr": 1.0}, result.history[-1]["lr"]
        tuned = fed.run(models[i], [(x, y)], fed.FedAvg(), **alone | {"lr": lr}, buffers="average", test=TEST)
        assert result.personal[i]["after"] == tuned.history[-1]["test_accuracy"]


def test_a_resumed_run_has_the_bits_of_one_without_a_pause(tmp_path):
    options = {"test": TEST, "validation": "shared", "checkpoint_every": 1}
    whole = ran(normalised(), fed.FedBN(), batch_of(OPTIONS, 6), **options)
    begun = oracle.Options(**{**vars(batch_of(OPTIONS, 6)), "rounds": 2})
    ran(normalised(), fed.FedBN(), begun, run_dir=tmp_path, **options)
    parts = ran(normalised(), fed.FedBN(), batch_of(OPTIONS, 6), run_dir=tmp_path, resume=True, **options)
    assert all(apart(whole.client_model(i), parts.client_model(i)) == 0 for i in range(5))
    for one, other in zip(whole.history, parts.history, strict=True):
        assert {k: v for k, v in one.items() if "seconds" not in k} == {
            k: v for k, v in other.items() if "seconds" not in k
        }


def test_threads_have_the_bits_of_the_plain_executor():
    one, other = (
        ran(normalised(), fed.FedBN(), batch_of(OPTIONS, 6), executor=name) for name in ("sequential", "threads")
    )
    assert all(apart(one.client_model(i), other.client_model(i)) == 0 for i in range(5))


def test_what_stays_is_not_sent():
    model = normalised()
    records = [ran(model, fed.FedAvg(), batch_of(OPTIONS, 6), buffers="average").history[0]]
    records.append(ran(model, fed.FedBN(), batch_of(OPTIONS, 6)).history[0])
    size = {n: t.numel() * t.element_size() for n, t in model.state_dict().items()}
    stays = sum(size[n] for n in size if n.startswith("1."))
    for way in ("megabytes_down", "megabytes_up"):
        plain, own = (record[way] for record in records)
        assert plain - own == pytest.approx(len(ACTIVE[0]) * stays / 1e6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("made[self.places] = state[OWN]", "made[self.places] += 0 * state[OWN]"),
        ("buffers=buffers or None", "buffers=None"),
        ("client[OWN] + ends.displacement", "client[OWN] - ends.displacement"),
        ("start[:, self.places] = own", "pass"),
        ("move_buffers(begun, by)", "move_buffers(begun, 0 * by)"),
        ("None if x is None else x.masked_fill(self.mask, 0)", "x"),
    ],
)
def test_a_wrong_line_is_noticed(old, new):
    model, wanted = fedbn_case()
    with replaced("fastsam.fed.loop.personal", old, new):
        assert furthest(ran(model, fed.FedBN(), batch_of(OPTIONS, 6)), wanted) > 1e-6


@pytest.mark.parametrize(
    ("model", "algorithm", "options", "words"),
    [
        (oracle.smooth_model, fed.FedBN(), {}, "FedBN leaves normalisation layers .* the model has none: use FedAvg"),
        (normalised, fed.FedBN(), {"buffers": "keep"}, "FedBN leaves the model's buffers with the clients, and buffers='keep' does not"),
        (normalised, fed.FedBN(), {"aggregation": "median"}, "FedBN, whose parameters stay .* 'median' compares whole models"),
        (normalised, fed.Centralised_SGD(), {"buffers": "local"}, "buffers='local' is for clients, and Centralised_SGD has none"),
        (normalised, fed.FedSAM(), {"buffers": "local", "measures": ["train"]}, "measures take .* buffers='local' changes them"),
    ],
    ids=["no layer", "kept", "robust", "centralised", "measures"],
)  # fmt: skip
def test_what_cannot_stay(model, algorithm, options, words):
    with pytest.raises(ValueError, match=words):
        ran(model(), algorithm, batch_of(OPTIONS, 6), **options)
