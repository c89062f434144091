"""The measures of a run: their records, their rounds, and that they do not change the run."""

import json
import re
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastsam import fed
from fastsam.fed.measures import NAMES, Objective, diagnostics, sharpness, unit
from fastsam.fed.measures.hook import accuracy, kept_steps
from tests.helpers import oracle, quadratic
from tests.helpers.fed_measured import measure_of, run
from tests.helpers.fed_runs import fixed_linear
from tests.helpers.places import ROOT

ADDED = {key for keys in NAMES.values() for key in keys}


def test_measuring_everything_changes_no_bit_of_the_run():
    plain, measured_result = run(), run(measures=fed.NamedMeasures(list(NAMES), iterations=3, steps=2))
    for a, b in zip(plain.model.parameters(), measured_result.model.parameters()):
        assert torch.equal(a, b)
    for plain_record, measured_record in zip(plain.history, measured_result.history):
        assert measured_record.keys() >= ADDED and not ADDED & plain_record.keys()
        assert {k: v for k, v in measured_record.items() if k not in ADDED and not k.startswith("seconds")} == {
            k: v for k, v in plain_record.items() if not k.startswith("seconds")
        }
    # With FedSAM only the measure of FedSMOO has no value. A second run records the same values.
    assert {k for k in ADDED if measured_result.history[-1][k] is None} == {"dual_gap"}
    repeated_result = run(measures=fed.NamedMeasures(list(NAMES), iterations=3, steps=2))
    first, second = ([[r[k] for k in sorted(ADDED)] for r in run.history] for run in (measured_result, repeated_result))
    assert first == second


def test_the_last_record_is_about_the_final_model():
    result = run(measures=fed.NamedMeasures(["train", "sharpness", "sharpness_ascent", "margin"], rho=0.3, steps=4))
    model, pairs = result.model, oracle.ragged_clients()
    quadratic_model = quadratic.replica(model)
    w, f = quadratic_model.row.clone(), Objective.sample_mean(quadratic_model, F.cross_entropy, pairs)
    x, y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    last = result.history[-1]
    assert last["train_set_loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-12)
    assert (
        last["train_set_accuracy"]
        == (model(x).argmax(1) == y).double().mean().item()
        == accuracy(quadratic_model, pairs, w)
    )
    assert last["sharpness"] == pytest.approx(sharpness.one_step(f, w, 0.3), rel=1e-12)
    assert last["sharpness_ascent"] == pytest.approx(sharpness.ascent(f, w, 0.3, 4), rel=1e-12)
    assert last["sharpness_ascent"] >= last["sharpness"] > 0
    assert last["margin_risk"] == diagnostics.margin_risk(quadratic_model, pairs, w)
    fair = Objective.mean_of(quadratic.replica(model), F.cross_entropy, pairs)
    perturbed_weights = w + 0.3 * unit(fair.gradient(w))
    assert (
        last["margin_risk_perturbed"]
        == diagnostics.margin_risk(quadratic_model, pairs, perturbed_weights)
        != last["margin_risk"]
    )
    assert last["spectral_complexity"] == diagnostics.spectral_complexity(quadratic_model.layout, w)
    assert result.summary()["measures"]["sharpness"] == last["sharpness"]


def test_measured_rounds_are_every_so_many_and_the_last():
    result = run(measures={"names": ["sharpness", "drifts"], "every": 2}, rounds=5)
    assert [r["round"] for r in result.history if r["sharpness"] is not None] == [2, 4, 5]
    assert [r["round"] for r in result.history if r["e_w"] is not None] == [2, 4, 5]


def test_one_step_rounds_have_no_drift_and_equal_clients_perturb_like_the_global_model():
    """All clients hold the same data and take one full-batch step: w_i,0 is w^t, and their direction is the global
    gradient's."""
    clients = [oracle.ragged_clients(sizes=(16,))[0]] * 4
    last = run(measures=["drifts", "perturbation_drift"], clients=clients, batch_size=16, shuffle=False).history[-1]
    assert last["e_w"] == 0 and last["e_delta"] == 0
    assert last["perturbation_drift"] == pytest.approx(0, abs=1e-6)
    record = run(measures=["drifts", "perturbation_drift"], local_epochs=2).history[-1]
    assert record["e_w"] > 0 and record["e_delta"] > 0 and 0.05 < record["perturbation_drift"] < 1


def test_fedlesam_has_exactly_no_perturbation_spread_while_every_client_holds_the_same_old_model():
    result = run(fed.FedLESAM(rho=0.1), ["drifts", "perturbation_drift"], participation=1.0, local_epochs=2)
    assert [r["e_delta"] for r in result.history] == [0, 0, 0]
    assert all(r["e_w"] > 0 and r["perturbation_drift"] > 0 for r in result.history)
    partly = run(fed.FedLESAM(rho=0.1), ["drifts"], participation=0.6, rounds=4)
    assert max(r["e_delta"] for r in partly.history) > 0  # clients that were away remember older models


def test_without_perturbations_their_measures_have_no_value():
    last = run(fed.FedAvg(), ["drifts", "perturbation_drift", "dual_gap"]).history[-1]
    assert last["e_delta"] is None and last["perturbation_drift"] is None and last["dual_gap"] is None
    assert last["e_w"] > 0


def test_fedsmoo_has_a_dual_gap():
    result = run(fed.FedSMOO(rho=0.1), ["dual_gap"])
    # In the first round s = 0, and the gap is the norm of a mean of vectors of length rho.
    assert 0 < result.history[0]["dual_gap"] <= 0.1 * (1 + 1e-6) and result.history[-1]["dual_gap"] > 0


def test_smoothness_and_variances_of_a_quadratic_run():
    """Hessian diag(4, 1, ...) for every client, centres c_i: sigma_g is the spread of A c_i."""
    curvature = torch.diag(torch.tensor([4.0, 1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    clients = [quadratic.samples([1.0, 1.0]), quadratic.samples([-1.0, 1.0])]
    names = fed.NamedMeasures(["smoothness", "variances", "estimation_bias"], iterations=200)
    result = run(
        fed.FedAvg(), names, clients, quadratic.Point(), loss=quadratic.loss_of(curvature), test=None,
        participation=1.0, lr=0.05, local_epochs=3,
    )  # fmt: skip
    last = result.history[-1]
    assert last["hessian_norm"] == pytest.approx(4, rel=1e-2)
    assert last["smoothness_clients"] == pytest.approx(4, rel=0.2) and last["smoothness_clients"] <= 4 + 1e-9
    # by symmetry only the second coordinate of the global model changes
    assert last["smoothness_global"] == pytest.approx(1)
    assert last["sigma_g"] == pytest.approx(4) and last["sigma_l"] == 0
    assert last["estimation_bias"] == pytest.approx(0, abs=1e-7)


def test_the_variance_within_clients_is_over_batches_and_clients():
    """At w = 0 with unit curvature the batches of client 0 pull along e1 and e2: sigma^2 = 2 - sqrt(2); those of client
    1 agree."""
    clients = [quadratic.samples([2.0], [0, 2.0]), quadratic.samples([-1.0, -1.0], [-1.0, -1.0])]
    last = run(
        fed.FedAvg(), ["variances"], clients, quadratic.Point(),
        loss=quadratic.loss_of(torch.eye(6, dtype=torch.float64)),
        test=None, participation=1.0, lr=1e-9, rounds=1, batch_size=1,
    ).history[-1]  # fmt: skip
    assert last["sigma_l"] == pytest.approx(((2 - 2**0.5) / 2) ** 0.5, rel=1e-6)
    assert last["sigma_g"] == pytest.approx(2**0.5, rel=1e-6)  # the clients' gradients are (-1, -1) and (1, 1)


class Spoiled(fed.FedAvg):
    """FedAvg whose client 1 sends NaN."""

    def finish(self, server, client, results, round):
        is_bad = torch.tensor([i == 1 for i in results.client_ids])[:, None]
        return client, fed.Upload({"delta": torch.where(is_bad, torch.nan, results.delta)})


def test_what_needs_the_clients_has_no_value_when_one_was_excluded_for_its_upload():
    result = run(Spoiled(), ["consistency", "drifts", "sharpness"], participation=1.0, rounds=1)
    (record,) = result.history
    assert [entry["client"] for entry in record["excluded"]] == [1]
    assert record["consistency"] is None and record["e_w"] is None and record["sharpness"] is not None


def test_a_client_that_diverged_is_left_out_of_the_measures():
    def samples(n, point):
        return torch.full((n, 6), point, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)

    clients = [samples(5, 0.1), samples(5, 0.2), samples(5, 1e200)]
    model = fixed_linear().double()  # which gives class 0 the smallest output
    result = run(fed.FedAvg(), ["consistency", "drifts"], clients, model, participation=1.0, test=None, rounds=1)
    assert [e["client"] for e in result.history[0]["excluded"]] == [2]
    assert result.history[0]["consistency"] < 1 and result.history[0]["e_w"] == 0


def test_kept_steps():
    assert [kept_steps(n) for n in (1, 2, 3, 10)] == [(0, 0, 0), (0, 0, 1), (0, 1, 2), (0, 4, 9)]


class Own:
    """A user's own measure: the clients' steps."""

    def snapshots(self, round, steps):
        return (0,)

    def clients(self, before, results, about):
        assert all(torch.equal(snapshots[0].w, before["w"]) for snapshots in results.snapshots)
        return {"my steps": results.num_steps}

    def round(self, before, after, aggregate, about):
        return {"my_steps": aggregate.scalar("my steps")}


@pytest.mark.parametrize("algorithm", [fed.FedAvg(), fed.Ditto()], ids=["FedAvg", "Ditto"])
def test_an_object_of_the_users_own(algorithm):
    """The second model of Ditto's clients leaves the copies of the first one."""
    assert all(r["my_steps"] == r["steps"] for r in run(algorithm, measures=Own()).history)


PAGE = ROOT / "docs" / "measures.md"


def test_the_documentation_lists_every_measure_with_its_keys_and_every_option():
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    keys_by_measure = {row[0].strip("| `"): re.findall(r"`(\w+)`", row[1]) for row in rows if len(row) == 4}
    assert keys_by_measure == {name: list(keys) for name, keys in NAMES.items()}
    options = {row[0].strip("| `"): row[1] for row in rows if len(row) == 3}
    assert options == {
        f.name: "none" if f.default is None else str(f.default) for f in fields(fed.NamedMeasures) if f.name != "names"
    }


def test_the_code_of_the_documentation_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    model, data = oracle.smooth_model(torch.float32), oracle.ragged_clients(torch.float32)
    w = torch.zeros(256)
    names = {"torch": torch, "fed": fed, "model": model, "data": data, "clients": data, "v": w}
    for block in blocks:
        exec(block.replace("rounds=50", "rounds=2").replace('"every": 10', '"every": 1'), names)
    assert len(blocks) == 4 and names["result"].history[-1]["sharpness"] > 0
    model, data = names["model"], list(names["data"])
    assert names["F"].value(names["w"]) == pytest.approx(
        F.cross_entropy(model(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])).item(), rel=1e-5
    )


# --- A user's own measures: what they return is in the record, or an error names it.


def test_numbers_of_other_types_go_into_the_record(tmp_path):
    """Tensors and numpy's numbers, which JSON does not know: a run must not end over its first record."""
    values = {"a": torch.tensor(1.5), "b": np.float32(0.25), "c": None, "d": 3}
    user_measure = measure_of(
        clients=lambda b, results, r: {"k": torch.full((len(results.num_steps),), 2.0)},
        round=lambda b, a, aggregate, r: {**values, "k": aggregate.scalar("k")},
    )
    result = run(measures=user_measure, rounds=1, run_dir=tmp_path / "run")
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    expected = {"a": 1.5, "b": 0.25, "c": None, "d": 3, "k": 2.0 * line["clients"]}
    assert {name: line[name] for name in expected} == expected == {n: result.history[0][n] for n in expected}
