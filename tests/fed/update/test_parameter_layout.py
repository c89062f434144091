"""Rows as users see them: parameters by name, vectors in torch's order, the model, without padding."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fastsam import fed
from fastsam.arena import Layout
from fastsam.fed.update.model_copy import trainable


class Small(nn.Module):
    """A convolution (stored channels_last by the rule on the CPU), a normalisation with buffers, a frozen and a tied
    weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, (3, 2)), nn.BatchNorm2d(4)
        self.out, self.frozen = nn.Linear(4, 5), nn.Parameter(torch.ones(5), requires_grad=False)
        self.tied = self.out

    def forward(self, x):
        return self.tied(F.relu(self.norm(self.conv(x))).mean((2, 3))) * self.frozen


def small_model(dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Small().to(dtype)


def clients(count=4):
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(12, 3, 6, 6, generator=draw), torch.randint(0, 5, (12,), generator=draw)) for _ in range(count)
    ]


def run(algorithm=None, measures=(), **options):
    settings = {
        "rounds": 2, "participation": 1.0, "batch_size": 6, "lr": 0.1, "test": clients()[0], "buffers": "average",
    }  # fmt: skip
    return fed.run(small_model(), clients(), algorithm or fed.FedSAM(rho=0.1), measures=measures, **settings | options)


@pytest.fixture
def rows():
    model = small_model(torch.float64).to(memory_format=torch.channels_last)
    return fed.ParameterLayout.from_model(model, Layout.from_tensors(trainable(model)))


NUMEL = 3 * 4 * 6 + 4 + 4 + 4 + 20 + 5
NAMES = ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "out.weight", "out.bias"]


def values(*lead):
    shapes = dict(zip(NAMES, [(4, 3, 3, 2), (4,), (4,), (4,), (5, 4), (5,)], strict=True))
    return {name: torch.randn(*lead, *shape, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_rows_vectors_and_parameters_are_each_others_opposites(rows, lead):
    parts = values(*lead)
    row = rows.flatten(parts)
    assert row.shape == (*lead, rows.row_size) and rows.row_size == 256 and rows.numel == NUMEL
    views = rows.unflatten(row)
    assert list(views) == NAMES and all(torch.equal(views[name], parts[name]) for name in NAMES)
    vector = rows.vector(row)
    assert torch.equal(vector, torch.cat([parts[name].reshape(*lead, -1) for name in NAMES], dim=-1))
    assert torch.equal(rows.row(vector), row)
    assert float(row.abs().sum()) == pytest.approx(float(vector.abs().sum()))  # nothing in the padding


def test_writing_into_views_leaves_the_padding_zero(rows):
    row = torch.zeros(2, rows.row_size, dtype=torch.float64)
    for view in rows.unflatten(row).values():
        view.normal_()
    assert int((row != 0).sum()) == 2 * NUMEL
    transposed_rows = torch.zeros(
        rows.row_size, 2, dtype=torch.float64
    ).t()  # not one after the other in memory: read as a copy
    assert rows.unflatten(transposed_rows)["out.weight"].shape == (2, 5, 4)


class Accuracies:
    """A number of the global model, computed by a user in three ways and compared with the record."""

    def __init__(self):
        self.records, self.steps = [], []

    def snapshots(self, round, steps):
        return (0,)

    def clients(self, before, results, facts):
        p = facts.layout.numel
        assert before["w"].shape == (p,) and results.delta.shape == (len(results.client_ids), p)
        first = results.snapshots[0][0]
        assert torch.equal(first.w, before["w"]) and first.eps.shape == (p,)
        self.records.append(facts.layout.unflatten(results.delta)["conv.weight"].clone())
        return {"apply_update": results.delta.square().sum(1)}

    def round(self, before, after, aggregate, facts):
        assert aggregate.mean("delta").shape == after["w"].shape == (facts.layout.numel,)
        assert torch.allclose(aggregate.mean("delta"), (after["w"] - before["w"]).double(), atol=1e-6)
        x, y = clients()[0]
        model = facts.layout.model(after["w"])
        with torch.no_grad():
            row = float(F.cross_entropy(model(x), y))
            by_vector = facts.layout.model(before["w"])  # with the buffers of after
            vector_to_parameters(after["w"], [p for p in by_vector.parameters() if p.requires_grad])
            expected_loss = float(F.cross_entropy(by_vector(x), y))
        assert torch.equal(parameters_to_vector([p for p in model.parameters() if p.requires_grad]), after["w"])
        assert not model.training and {p.data_ptr() for p in model.parameters()}.isdisjoint({after["w"].data_ptr()})
        return {"mine": row, "other": expected_loss}


@pytest.mark.parametrize("executor", ["sequential", "threads"])
@pytest.mark.parametrize("format", ["auto", "preserve"])
def test_a_measure_sees_vectors_as_torch_makes_them_and_the_model(format, executor):
    """The order of a convolution's weight in a row is the run's own: with it a model of 93.9 % had 14.4 %."""
    options = {"memory_format": format, "executor": executor}
    measures = Accuracies()
    result = run(measures=measures, **options)
    for record in result.history:
        assert record["mine"] == record["other"] == pytest.approx(record["test_loss"], rel=1e-6)
    repeat = run(**options)
    assert parameters_to_vector(repeat.model.parameters()).equal(parameters_to_vector(result.model.parameters()))
    assert all(d.shape[1:] == (4, 3, 3, 2) for d in measures.records)


@dataclass(frozen=True)
class Noisy(fed.Algorithm):
    """An algorithm that changes one filter of one parameter, selected by name."""

    def local_step(self, server, client, round):
        q = torch.zeros_like(server["w"])
        round.layout.unflatten(q)["conv.weight"][2] = 1.0
        return fed.Step(a=0.0, q=q)


@pytest.mark.parametrize("format", ["auto", "preserve"])
def test_an_algorithm_reaches_a_parameter_by_name(format):
    """With a = 0 the clients go against q alone: two rounds of two steps of size 0.1."""
    result = run(Noisy(), memory_format=format)
    for (name, new), old in zip(result.model.named_parameters(), small_model().parameters(), strict=True):
        expected = torch.zeros_like(old)
        if name == "conv.weight":
            expected[2] = -0.4
        assert torch.allclose(new - old, expected, atol=1e-6), name


@dataclass(frozen=True)
class Writing(fed.Algorithm):
    def local_step(self, server, client, round):
        round.layout.unflatten(server["w"])["out.bias"].zero_()
        return fed.Step()


def test_views_of_the_servers_row_are_watched_too():
    with pytest.raises(ValueError, match=r"wrote into server\['w'\]"):
        run(Writing())


def test_a_mask_by_names_and_modules(rows):
    """True where a parameter of that name is, in whatever order it is stored; never in the padding."""
    for patterns, expected_value in (
        ("conv", {"conv.weight", "conv.bias"}),
        ("*.bias", {"conv.bias", "norm.bias", "out.bias"}),
        (["out.weight", "nor?"], {"out.weight", "norm.weight", "norm.bias"}),
    ):
        mask = rows.mask("personal", patterns)
        parts = rows.unflatten(mask)
        assert {name for name, part in parts.items() if part.all()} == expected_value
        assert int(mask.sum()) == sum(parts[name].numel() for name in expected_value)
    for pattern in ("frozen", "con", "weight"):
        with pytest.raises(
            ValueError,
            match=f"personal: '{pattern}' matches no trainable parameter of the model; its names are conv.weight, ",
        ):
            rows.mask("personal", pattern)
