"""Algorithms with client models, compared with loops in plain torch (`oracle.personal`)."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import fed
from fastsam.fed.executors import stacked
from fastsam.fed.executors.graph import Graph
from tests.helpers import oracle
from tests.helpers.fed_cases import ACTIVE, replayed
from tests.helpers.fed_runs import same_bits
from tests.helpers.mutants.apply import replaced
from tests.helpers.mutants.table import PERSONAL
from tests.helpers.oracle import personal as unfused
from tests.helpers.setups import setup_of

OPTIONS = oracle.Options(rounds=4, momentum=0.5, weight_decay=0.02, server_lr=0.7, shuffle=True, seed=3, epochs=2)
SIZES = (8, 12, 5, 9, 23)  # no batch of 6 leaves a single sample, on which BatchNorm could not train
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
    """Return the largest difference over the shared model and all client models."""
    shared, own = wanted
    found = [apart(result.client_model(i), model) for i, model in enumerate(own)]
    return max([apart(result.model, shared), *found])


def ran(model: nn.Module, algorithm: Any, options: oracle.Options = OPTIONS, **more: Any) -> fed.Result:
    return replayed(model, oracle.ragged_clients(sizes=SIZES), algorithm, options, ACTIVE, **more)


def sometimes(cases: Any, usual: Any) -> list[Any]:
    """Return parameters of a test; unusual ones are marked as slow."""
    return [pytest.param(c, marks=[] if usual(c) else [pytest.mark.slow]) for c in cases]


# --- FedBN


@functools.cache
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
    other = ran(model, fed.FedAvg(), options, local_parameters="1", buffers="local")
    assert all(apart(one.client_model(i), other.client_model(i)) == 0 for i in range(5))
    assert {k: v for k, v in one.history[-1].items() if "seconds" not in k} == {
        k: v for k, v in other.history[-1].items() if "seconds" not in k
    }


def test_buffers_alone_may_stay():
    """All parameters are averaged, as in a run that averages buffers, and statistics stay with the clients."""
    options = batch_of(OPTIONS, 6)
    local, averaged = (ran(normalised(), fed.FedSAM(), options, buffers=kind) for kind in ("local", "average"))
    assert same_bits(local.model, averaged.model), "in training a batch is normalised by its own statistics"
    own = local.client_model(3)
    assert same_bits(own, local.model) and apart(own[1], averaged.model[1]) > 1e-2
    assert apart(own[1], local.client_model(0)[1]) > 1e-2
    assert own[1].num_batches_tracked == 2 * 2 * sum(3 in active for active in ACTIVE[:4])


def test_what_stays_is_not_sent():
    model = normalised()
    records = [ran(model, fed.FedAvg(), batch_of(OPTIONS, 6), buffers="average").history[0]]
    records.append(ran(model, fed.FedBN(), batch_of(OPTIONS, 6)).history[0])
    size = {n: t.numel() * t.element_size() for n, t in model.state_dict().items()}
    stays = sum(size[n] for n in size if n.startswith("1."))
    for way in ("megabytes_down", "megabytes_up"):
        plain, own = (record[way] for record in records)
        assert plain - own == pytest.approx(len(ACTIVE[0]) * stays / 1e6)


# --- FedRep


@functools.cache
def fedrep_case(head_epochs: int = 3) -> tuple[nn.Module, unfused.Ended]:
    model, clients = oracle.smooth_model(), oracle.ragged_clients(sizes=SIZES)
    return model, unfused.fedrep(model, clients, OPTIONS, ACTIVE, ["2.weight", "2.bias"], head_epochs)


def test_fedrep_against_a_plain_loop():
    model, wanted = fedrep_case()
    result = ran(model, fed.FedRep(head_epochs=3))
    assert furthest(result, wanted) < 1e-12
    assert apart(result.client_model(0), result.client_model(1)) > 1e-2
    assert same_bits(result.model[2], model[2]) and apart(result.model[0], model[0]) > 1e-2
    assert all(p.requires_grad for p in result.client_model(0).parameters())


def test_the_head_of_fedrep_may_be_named():
    model, clients = oracle.smooth_model(), oracle.ragged_clients(sizes=SIZES)
    wanted = unfused.fedrep(model, clients, OPTIONS, ACTIVE, ["0.weight"], 1)
    assert furthest(ran(model, fed.FedRep(head="0.weight", head_epochs=1)), wanted) < 1e-12


def test_fedrep_with_local_steps_and_sam():
    """`local_steps` counts steps of the representation; SAM perturbs only the parameters that a phase trains."""
    model = oracle.smooth_model()
    options = oracle.Options(**{**vars(OPTIONS), "epochs": 1})
    epoch = {i: -(-n // OPTIONS.batch) for i, n in enumerate(SIZES)}
    result = ran(model, fed.FedRep(head_epochs=2), options, local_steps=2)
    assert [r["steps"] for r in result.history] == [sum(2 * epoch[i] + 2 for i in active) for active in ACTIVE[:4]]
    assert [r["backprops"] for r in result.history] == [r["steps"] for r in result.history]

    class Sharp(fed.FedRep):
        def local_update(self, server, client, round):
            return fed.LocalUpdate(fed.Direction.GRADIENT, rho=0.3)

    flat = ran(model, fed.FedRep(head_epochs=1), options)
    sharp = ran(model, Sharp(head_epochs=1), options)
    assert apart(flat.model, sharp.model) > 1e-3 and same_bits(sharp.model[2], model[2])
    assert sum(r["backprops"] for r in sharp.history) == 2 * sum(r["backprops"] for r in flat.history)


def test_fedrep_with_batch_norm_counts_the_statistics_of_both_phases():
    model = normalised()
    result = ran(model, fed.FedRep(head_epochs=2), batch_of(OPTIONS, 6), buffers="local")
    batches = {i: -(-n // 6) for i, n in enumerate(SIZES)}
    for i in range(5):
        rounds = sum(i in active for active in ACTIVE[:4])
        assert result.client_model(i)[1].num_batches_tracked == rounds * batches[i] * (2 + OPTIONS.epochs)


# --- Ditto


@functools.cache
def ditto_case(lam: float = 0.7, epochs: int | None = None) -> tuple[nn.Module, unfused.Ended]:
    model, clients = oracle.smooth_model(), oracle.ragged_clients(sizes=SIZES)
    return model, unfused.ditto(model, clients, OPTIONS, ACTIVE, lam, epochs)


@pytest.mark.parametrize("epochs", sometimes([None, 3], lambda epochs: epochs is None))
def test_ditto_against_a_plain_loop(epochs):
    model, wanted = ditto_case(epochs=epochs)
    result = ran(model, fed.Ditto(lam=0.7, epochs=epochs))
    assert furthest(result, wanted) < 1e-12
    assert apart(result.client_model(1), result.model) > 1e-2


def test_dittos_global_model_is_fedavgs():
    model = oracle.smooth_model()
    one, other = ran(model, fed.Ditto(), aggregation="median"), ran(model, fed.FedAvg(), aggregation="median")
    assert same_bits(one.model, other.model)
    assert [r["train_loss"] for r in one.history] == [r["train_loss"] for r in other.history]
    assert [r["steps"] for r in one.history] == [r["steps"] for r in other.history]
    assert [r["backprops"] for r in one.history] == [2 * r["backprops"] for r in other.history]


def test_who_has_not_taken_part_has_the_global_model():
    result = replayed(oracle.smooth_model(), oracle.ragged_clients(), fed.Ditto(), OPTIONS, [[0, 1]] * 4)
    assert same_bits(result.client_model(3), result.model) and not same_bits(result.client_model(0), result.model)


# --- pFedMe


@functools.cache
def pfedme_case() -> tuple[nn.Module, unfused.Ended]:
    model, clients = oracle.smooth_model(), oracle.ragged_clients(sizes=SIZES)
    return model, unfused.pfedme(model, clients, OPTIONS, ACTIVE, lam=2.0, K=3, eta=0.2)


PFEDME = fed.pFedMe(lam=2.0, K=3, eta=0.2)


def test_pfedme_against_a_plain_loop():
    model, wanted = pfedme_case()
    result = ran(model, PFEDME)
    assert furthest(result, wanted) < 1e-12
    assert apart(result.client_model(1), result.model) > 1e-2 and apart(result.model, model) > 1e-2
    batches = [OPTIONS.epochs * sum(-(-SIZES[i] // OPTIONS.batch) for i in active) for active in ACTIVE[:4]]
    assert [r["steps"] for r in result.history] == [3 * n for n in batches] == [r["backprops"] for r in result.history]


def test_the_train_loss_of_pfedme_is_the_mean_over_all_its_steps():
    """With steps too small to move anything it is the loss of the start."""
    options = oracle.Options(**{**vars(OPTIONS), "rounds": 1, "lr": 1e-12, "batch": 6})
    one, other = (ran(oracle.smooth_model(), algorithm, options) for algorithm in (PFEDME, fed.FedAvg()))
    assert one.history[0]["train_loss"] == pytest.approx(other.history[0]["train_loss"])


# --- APFL


@functools.cache
def apfl_case(alpha: float = 0.3, eta_alpha: float | None = 0.4) -> tuple[nn.Module, unfused.Ended]:
    model, clients = oracle.smooth_model(), oracle.ragged_clients(sizes=SIZES)
    return model, unfused.apfl(model, clients, OPTIONS, ACTIVE, alpha, eta_alpha)


APFL = fed.APFL(alpha=0.3, eta_alpha=0.4)


@pytest.mark.parametrize(
    "case", sometimes([(0.3, 0.4), (0.8, None), (0.6, 0.0), (0.02, 9.0)], lambda case: case[0] == 0.3), ids=str
)
def test_apfl_against_a_plain_loop(case):
    model, wanted = apfl_case(*case)
    result = ran(model, fed.APFL(*case))
    assert furthest(result, wanted) < 1e-12
    assert apart(result.client_model(1), result.model) > 1e-3


def test_the_shared_model_of_apfl_is_fedavgs():
    one, other = (ran(oracle.smooth_model(), algorithm) for algorithm in (APFL, fed.FedAvg()))
    assert same_bits(one.model, other.model)
    assert [r["train_loss"] for r in one.history] == [r["train_loss"] for r in other.history]
    assert [r["steps"] for r in one.history] == [r["steps"] for r in other.history]
    assert [r["backprops"] for r in one.history] == [2 * r["backprops"] for r in other.history]


def test_models_of_apfl_that_mix_nothing_in_are_dittos_that_nothing_holds():
    one, other = (ran(oracle.smooth_model(), algorithm) for algorithm in (fed.APFL(1.0, 0.0), fed.Ditto(lam=0.0)))
    assert all(same_bits(one.client_model(i), other.client_model(i)) for i in range(5))


# --- all of them

ALL = {
    "FedBN": (normalised, fed.FedBN()),
    "FedRep": (oracle.smooth_model, fed.FedRep(head_epochs=2)),
    "Ditto": (oracle.smooth_model, fed.Ditto()),
    "pFedMe": (oracle.smooth_model, PFEDME),
    "APFL": (oracle.smooth_model, APFL),
}

some = pytest.mark.parametrize("name", sometimes(ALL, lambda name: name in ("FedBN", "Ditto")))


@some
def test_accuracies_are_those_of_the_clients_models(name):
    made, algorithm = ALL[name]
    options = oracle.Options(**{**vars(batch_of(OPTIONS, 6)), "shuffle": False})
    result = ran(made(), algorithm, options, test=TEST, client_test_split="shared")
    models = [result.client_model(i).eval() for i in range(5)]
    found = [(model(TEST[0]).argmax(1) == TEST[1]).double().mean().item() for model in models]
    assert result.history[-1]["client_accuracy_mean"] == pytest.approx(sum(found) / 5)
    clients = oracle.ragged_clients(sizes=SIZES)
    tuned = fed.finetune(result, clients, epochs=options.epochs, test=TEST)
    assert [one["before"] for one in tuned] == pytest.approx(found)
    assert len(set(found)) > 1
    for i, client in enumerate(clients):
        alone, lr = {**options.keywords(), "rounds": 1, "server_lr": 1.0}, result.history[-1]["lr"]
        own = alone | {"lr": lr, "buffers": "average", "test": TEST}
        last = fed.run(models[i], [client], fed.FedAvg(), **own).history[-1]
        assert tuned[i]["after"] == last["test_accuracy"]


WANTED = {
    "fedbn": (fedbn_case, fed.FedBN(), batch_of(OPTIONS, 6)),
    "fedrep": (fedrep_case, fed.FedRep(head_epochs=3), OPTIONS),
    "ditto": (ditto_case, fed.Ditto(lam=0.7), OPTIONS),
    "pfedme": (pfedme_case, PFEDME, OPTIONS),
    "apfl": (apfl_case, APFL, OPTIONS),
    "apfl-extreme": (functools.partial(apfl_case, 0.02, 9.0), fed.APFL(0.02, 9.0), OPTIONS),
}
USUAL = [*{m.case: m for m in PERSONAL}.values()]  # in `make test` the last one of each case


@pytest.mark.parametrize("mutant", sometimes(PERSONAL, USUAL.__contains__), ids=lambda m: f"{m.function}: {m.new}")
def test_a_wrong_line_is_noticed(mutant):
    case, algorithm, options = WANTED[mutant.case]
    model, wanted = case()
    with replaced(*mutant[:4]):
        assert furthest(ran(model, algorithm, options), wanted) > 1e-6


@pytest.mark.parametrize("name", sometimes(["FedRep", "Ditto", "pFedMe", "APFL"], lambda name: name == "Ditto"))
def test_executors_that_take_no_loops_say_so(name):
    made, algorithm = ALL[name]
    words = f"{name} trains each client in a loop of its own"
    with pytest.raises(ValueError, match=f"'vmap' cannot serve here: {words}"):
        ran(made(), algorithm, executor="vmap")
    setup = setup_of(loop=name)
    assert words in (Graph.why_not(setup) or "") and words in (stacked.why_not(setup) or "")
    assert same_bits(ran(made(), algorithm, executor="auto").model, ran(made(), algorithm).model)


@pytest.mark.parametrize("name", sometimes(["FedRep", "Ditto", "pFedMe", "APFL"], lambda name: name == "FedRep"))
def test_samples_that_come_in_batches_have_phases_too(name):
    """Clients of dicts, whose samples are taken batch by batch: the bits of clients of tensors."""
    made, algorithm = ALL[name]
    model, clients = made(), oracle.ragged_clients(sizes=SIZES)
    options = oracle.Options(**{**vars(OPTIONS), "rounds": 2})
    dicts = [({"input": x}, y) for x, y in clients]
    one, other = (replayed(model, data, algorithm, options, ACTIVE) for data in (clients, dicts))
    assert all(apart(one.client_model(i), other.client_model(i)) == 0 for i in range(5))
