"""Algorithms with client models, compared with loops in plain torch (`oracle.personal`)."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.fed_runs import same_bits, untimed_records
from tests.helpers.mutants.apply import replace_source
from tests.helpers.mutants.table import PERSONAL
from tests.helpers.oracle import personal as unfused
from tests.promises.cases import ACTIVE, run_replayed

OPTIONS = oracle.Options(rounds=4, momentum=0.5, weight_decay=0.02, server_lr=0.7, shuffle=True, seed=3, epochs=2)
SIZES = (8, 12, 5, 9, 23)  # no batch of 6 leaves a single sample, on which BatchNorm could not train
TEST = oracle.ragged_clients(sizes=(60,), seed=5)[0]


def norm_model(batch: bool = True) -> nn.Module:
    """A layer, a normalisation, a layer; float64."""
    torch.manual_seed(1)
    layer = nn.BatchNorm1d(7) if batch else nn.LayerNorm(7)
    return nn.Sequential(nn.Linear(6, 7), layer, nn.Tanh(), nn.Linear(7, 3)).double()


def distance(a: nn.Module, b: nn.Module) -> float:
    """Largest difference of two models' parameters and buffers."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max((p.double() - q.double()).abs().max().item() for p, q in pairs)


def batch_of(options: oracle.Options, batch: int) -> oracle.Options:
    return oracle.Options(**{**vars(options), "batch": batch})


def largest_distance(result: fed.Result, expected: unfused.Ended) -> float:
    """Return the largest difference over the shared model and all client models."""
    shared_weights, models = expected
    distances = [distance(result.client_model(i), model) for i, model in enumerate(models)]
    return max([distance(result.model, shared_weights), *distances])


def train(model: nn.Module, algorithm: Any, options: oracle.Options = OPTIONS, **options_of_run: Any) -> fed.Result:
    return run_replayed(model, oracle.ragged_clients(sizes=SIZES), algorithm, options, ACTIVE, **options_of_run)


def mark_slow(cases: Any, usual: Any) -> list[Any]:
    """Return parameters of a test; unusual ones are marked as slow."""
    return [pytest.param(c, marks=[] if usual(c) else [pytest.mark.slow]) for c in cases]


# --- the comparison

PFEDME = fed.pFedMe(lam=2.0, K=3, eta=0.2)
APFL = fed.APFL(alpha=0.3, eta_alpha=0.4)
EVEN = batch_of(OPTIONS, 6)
# name: the model, the algorithm, options, and the plain loop as a function of model, clients, options and cohorts
CASES: dict[str, tuple[Any, Any, oracle.Options, Any]] = {
    "fedbn": (norm_model, fed.FedBN(), EVEN, lambda *run: unfused.fedbn(*run, ["1"])),
    "fedbn-LayerNorm": (lambda: norm_model(False), fed.FedBN(), EVEN, lambda *run: unfused.fedbn(*run, ["1"])),
    "fedrep": (oracle.smooth_model, fed.FedRep(head_epochs=3), OPTIONS,
        lambda *run: unfused.fedrep(*run, ["2.weight", "2.bias"], 3)),
    "fedrep-named": (oracle.smooth_model, fed.FedRep(head="0.weight", head_epochs=1), OPTIONS,
        lambda *run: unfused.fedrep(*run, ["0.weight"], 1)),
    "ditto": (oracle.smooth_model, fed.Ditto(lam=0.7), OPTIONS, lambda *run: unfused.ditto(*run, 0.7, None)),
    "ditto-epochs": (oracle.smooth_model, fed.Ditto(lam=0.7, epochs=3), OPTIONS,
        lambda *run: unfused.ditto(*run, 0.7, 3)),
    "pfedme": (oracle.smooth_model, PFEDME, OPTIONS, lambda *run: unfused.pfedme(*run, lam=2.0, K=3, eta=0.2)),
    "apfl": (oracle.smooth_model, APFL, OPTIONS, lambda *run: unfused.apfl(*run, 0.3, 0.4)),
    "apfl-rate": (oracle.smooth_model, fed.APFL(0.8, None), OPTIONS, lambda *run: unfused.apfl(*run, 0.8, None)),
    "apfl-fixed": (oracle.smooth_model, fed.APFL(0.6, 0.0), OPTIONS, lambda *run: unfused.apfl(*run, 0.6, 0.0)),
    "apfl-extreme": (oracle.smooth_model, fed.APFL(0.02, 9.0), OPTIONS, lambda *run: unfused.apfl(*run, 0.02, 9.0)),
}  # fmt: skip
SLOW = ("ditto-epochs", "apfl-rate", "apfl-fixed", "apfl-extreme")


@functools.cache
def plain_loop(name: str) -> tuple[nn.Module, unfused.Ended]:
    """Return the model of a case, and the models in which the plain loop ends."""
    make, _, options, loop = CASES[name]
    model = make()
    return model, loop(model, oracle.ragged_clients(sizes=SIZES), options, ACTIVE)


@pytest.mark.parametrize("name", mark_slow(CASES, lambda name: name not in SLOW))
def test_against_a_plain_loop(name):
    _, algorithm, options, _ = CASES[name]
    model, expected = plain_loop(name)
    result = train(model, algorithm, options)
    assert largest_distance(result, expected) < 1e-12
    assert distance(result.client_model(0), result.client_model(1)) > 1e-3
    assert distance(result.client_model(1), result.model) > 1e-3 and distance(result.model, model) > 1e-2
    assert all(p.requires_grad for p in result.client_model(0).parameters())


# --- FedBN


def test_fedbn_is_two_options_of_a_run():
    model = norm_model()
    options = EVEN
    bn_run = train(model, fed.FedBN(), options)
    avg_run = train(model, fed.FedAvg(), options, local_parameters="1", buffers="local")
    assert all(distance(bn_run.client_model(i), avg_run.client_model(i)) == 0 for i in range(5))
    assert untimed_records(bn_run) == untimed_records(avg_run)


def test_buffers_alone_may_stay():
    """All parameters are averaged, as in a run that averages buffers, and statistics stay with the clients."""
    options = EVEN
    local, averaged_run = (train(norm_model(), fed.FedSAM(), options, buffers=kind) for kind in ("local", "average"))
    assert same_bits(local.model, averaged_run.model), "in training a batch is normalised by its own statistics"
    own_model = local.client_model(3)
    assert same_bits(own_model, local.model) and distance(own_model[1], averaged_run.model[1]) > 1e-2
    assert distance(own_model[1], local.client_model(0)[1]) > 1e-2
    assert own_model[1].num_batches_tracked == 2 * 2 * sum(3 in active for active in ACTIVE[:4])


def test_what_stays_is_not_sent():
    model = norm_model()
    records = [train(model, fed.FedAvg(), EVEN, buffers="average").history[0]]
    records.append(train(model, fed.FedBN(), EVEN).history[0])
    size = {n: t.numel() * t.element_size() for n, t in model.state_dict().items()}
    stays = sum(size[n] for n in size if n.startswith("1."))
    for way in ("megabytes_down", "megabytes_up"):
        plain, original = (record[way] for record in records)
        assert plain - original == pytest.approx(len(ACTIVE[0]) * stays / 1e6)


# --- FedRep


def test_fedrep_with_local_steps_and_sam():
    """`local_steps` counts steps of the representation; SAM perturbs only the parameters that a phase trains."""
    model = oracle.smooth_model()
    options = oracle.Options(**{**vars(OPTIONS), "epochs": 1})
    epoch = {i: -(-n // OPTIONS.batch) for i, n in enumerate(SIZES)}
    result = train(model, fed.FedRep(head_epochs=2), options, local_steps=2)
    assert [r["steps"] for r in result.history] == [sum(2 * epoch[i] + 2 for i in active) for active in ACTIVE[:4]]
    assert [r["backprops"] for r in result.history] == [r["steps"] for r in result.history]

    class Sharp(fed.FedRep):
        def local_step(self, server, client, round):
            return fed.SAM(rho=0.3)

    flat = train(model, fed.FedRep(head_epochs=1), options)
    sharp = train(model, Sharp(head_epochs=1), options)
    assert distance(flat.model, sharp.model) > 1e-3 and same_bits(sharp.model[2], model[2])
    assert sum(r["backprops"] for r in sharp.history) == 2 * sum(r["backprops"] for r in flat.history)


def test_fedrep_with_batch_norm_counts_the_statistics_of_both_phases():
    model = norm_model()
    result = train(model, fed.FedRep(head_epochs=2), EVEN, buffers="local")
    batches = {i: -(-n // 6) for i, n in enumerate(SIZES)}
    for i in range(5):
        rounds = sum(i in active for active in ACTIVE[:4])
        assert result.client_model(i)[1].num_batches_tracked == rounds * batches[i] * (2 + OPTIONS.epochs)


# --- Ditto


@pytest.mark.parametrize(("algorithm", "options"), [(fed.Ditto(), {"aggregation": "median"}), (APFL, {})], ids=str)
def test_the_shared_model_is_fedavgs(algorithm, options):
    model = oracle.smooth_model()
    run_1, run_2 = (train(model, case, **options) for case in (algorithm, fed.FedAvg()))
    assert same_bits(run_1.model, run_2.model)
    for key, passes in (("train_loss", 1), ("steps", 1), ("backprops", 2)):
        assert [r[key] for r in run_1.history] == [passes * r[key] for r in run_2.history]


def test_who_has_not_taken_part_has_the_global_model():
    result = run_replayed(oracle.smooth_model(), oracle.ragged_clients(), fed.Ditto(), OPTIONS, [[0, 1]] * 4)
    assert same_bits(result.client_model(3), result.model) and not same_bits(result.client_model(0), result.model)


# --- pFedMe


def test_pfedme_takes_k_steps_on_every_batch():
    history = train(oracle.smooth_model(), PFEDME).history
    batches = [OPTIONS.epochs * sum(-(-SIZES[i] // OPTIONS.batch) for i in active) for active in ACTIVE[:4]]
    assert [r["steps"] for r in history] == [3 * n for n in batches] == [r["backprops"] for r in history]


def test_the_train_loss_of_pfedme_is_the_mean_over_all_its_steps():
    """With steps too small to move anything it is the loss of the start."""
    options = oracle.Options(**{**vars(OPTIONS), "rounds": 1, "lr": 1e-12, "batch": 6})
    run_1, run_2 = (train(oracle.smooth_model(), algorithm, options) for algorithm in (PFEDME, fed.FedAvg()))
    assert run_1.history[0]["train_loss"] == pytest.approx(run_2.history[0]["train_loss"])


# --- APFL


# --- all of them

ALL = {
    "FedBN": (norm_model, fed.FedBN()),
    "FedRep": (oracle.smooth_model, fed.FedRep(head_epochs=2)),
    "Ditto": (oracle.smooth_model, fed.Ditto()),
    "pFedMe": (oracle.smooth_model, PFEDME),
    "APFL": (oracle.smooth_model, APFL),
}

some_algorithms = pytest.mark.parametrize("name", mark_slow(ALL, lambda name: name in ("FedBN", "Ditto")))


@some_algorithms
def test_accuracies_are_those_of_the_clients_models(name):
    make_algorithm, algorithm = ALL[name]
    options = oracle.Options(**{**vars(EVEN), "shuffle": False})
    result = train(make_algorithm(), algorithm, options, test=TEST, client_test_split="shared")
    models = [result.client_model(i).eval() for i in range(5)]
    accuracies = [(model(TEST[0]).argmax(1) == TEST[1]).double().mean().item() for model in models]
    assert result.history[-1]["client_accuracy_mean"] == pytest.approx(sum(accuracies) / 5)
    clients = oracle.ragged_clients(sizes=SIZES)
    tuned_result = fed.finetune(result, clients, epochs=options.epochs, test=TEST)
    assert [entry["before"] for entry in tuned_result] == pytest.approx(accuracies)
    assert len(set(accuracies)) > 1
    for i, client in enumerate(clients):
        keywords, lr = {**options.keywords(), "rounds": 1, "server_lr": 1.0}, result.history[-1]["lr"]
        own_keywords = keywords | {"lr": lr, "buffers": "average", "test": TEST}
        last = fed.run(models[i], [client], fed.FedAvg(), **own_keywords).history[-1]
        assert tuned_result[i]["after"] == last["test_accuracy"]


USUAL = [*{m.case: m for m in PERSONAL}.values()]  # in `make test` the last one of each case


@pytest.mark.parametrize("mutant", mark_slow(PERSONAL, USUAL.__contains__), ids=lambda m: f"{m.function}: {m.new}")
def test_a_wrong_line_is_noticed(mutant):
    _, algorithm, options, _ = CASES[mutant.case]
    model, expected = plain_loop(mutant.case)
    with replace_source(*mutant[:4]):
        assert largest_distance(train(model, algorithm, options), expected) > 1e-6


@pytest.mark.parametrize("name", mark_slow(["FedRep", "Ditto", "pFedMe", "APFL"], lambda name: name == "FedRep"))
def test_samples_that_come_in_batches_have_phases_too(name):
    """Clients of dicts, whose samples are taken batch by batch: the bits of clients of tensors."""
    make_algorithm, algorithm = ALL[name]
    model, clients = make_algorithm(), oracle.ragged_clients(sizes=SIZES)
    options = oracle.Options(**{**vars(OPTIONS), "rounds": 2})
    dicts = [({"input": x}, y) for x, y in clients]
    run_1, run_2 = (run_replayed(model, data, algorithm, options, ACTIVE) for data in (clients, dicts))
    assert all(distance(run_1.client_model(i), run_2.client_model(i)) == 0 for i in range(5))
