"""The sequential executor: inputs of a client's training, and objects that it must not change."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastsam import fed
from fastsam.fed import executors
from tests.helpers import oracle
from tests.helpers.fed_runs import Drops, norm_model, same_bits
from tests.helpers.fed_seam import Reordered

FLOAT = torch.float32
run = partial(fed.run, executor="sequential")


def clients(*sizes, dtype=FLOAT):
    return oracle.ragged_clients(dtype, sizes)


def batches_of(rounds=1, seed=0, sizes=(7, 12), **options):
    """Return the sample numbers in the batches of each client and round, without batches of the trial step."""
    records = []

    def loss(outputs, y):
        records.append(y.int().tolist())
        return 0 * outputs.sum()

    data = [(torch.zeros(n, 6), torch.arange(float(n)) + 100 * i) for i, n in enumerate(sizes)]
    options |= {"rounds": rounds, "participation": 1.0, "batch_size": 5, "seed": seed, "loss": loss}
    history = run(oracle.smooth_model(FLOAT), data, fed.FedAvg(), **options).history
    return records[-sum(record["steps"] for record in history) :]


def test_shuffled_batches_hold_every_sample_once_in_an_order_of_seed_round_client_and_epoch():
    def orders(**options):
        flat = [i for batch in batches_of(rounds=2, local_epochs=2, sizes=(12, 12), **options) for i in batch]
        return [flat[start : start + 12] for start in range(0, len(flat), 12)]

    result = orders()
    assert [sorted(o) for o in result] == ([list(range(12))] * 2 + [list(range(100, 112))] * 2) * 2
    assert len({tuple(i % 100 for i in o) for o in result}) == 8  # no two epochs, clients or rounds share an order
    assert result == orders() and result != orders(seed=1)


def test_a_large_client_is_gathered_in_blocks_without_losing_a_sample():
    samples = 5 * 32 * 2 + 3
    batches = batches_of(sizes=(samples,))
    assert [len(b) for b in batches] == [5] * 64 + [3]
    assert sorted(i for b in batches for i in b) == list(range(samples))


@pytest.mark.parametrize("keep_share", [-math.inf, 1.5])
def test_both_passes_of_a_step_have_the_same_dropout_mask(keep_share):
    """So FedSAM without a radius is FedAvg."""
    data, options = clients(20, 9, 14), {"rounds": 3, "participation": 0.7, "batch_size": 4}
    avg, sam = (run(Drops(keep_share), data, a, **options).model for a in (fed.FedAvg(), fed.FedSAM(rho=0.0)))
    assert same_bits(avg, sam)
    assert not same_bits(avg, run(Drops(keep_share), data, fed.FedAvg(), seed=1, **options).model)


@pytest.mark.parametrize("keep_share", [-math.inf, 1.5])
def test_what_is_drawn_does_not_depend_on_when_it_is_noticed(monkeypatch, keep_share):
    data, options = clients(20, 9, 14, 3, 3, 8), {"rounds": 2, "participation": 0.9, "batch_size": 4}
    plain = run(Drops(keep_share), data, fed.FedSAM(), **options).model
    monkeypatch.setitem(executors.registry, "sequential", Reordered)
    for _ in range(3):
        assert same_bits(plain, run(Drops(keep_share), data, fed.FedSAM(), executor="sequential", **options).model)


def test_torchs_own_random_state_is_neither_used_nor_changed():
    finals = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model, old_state = Drops(), torch.get_rng_state()
        finals.append(run(model, clients(20, 9), fed.FedSAM(), rounds=2).model)
        assert torch.equal(old_state, torch.get_rng_state())
    assert same_bits(*finals)


class Doubled(torch.autograd.Function):
    """Writes the gradient that it gets, which torch allows where nothing else reads it."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(2)


def test_a_backward_pass_may_write_the_gradient_of_the_loss():
    """Steps with twice the gradient, and as long as steps with twice the learning rate."""
    options = {"rounds": 2, "participation": 1.0, "batch_size": 5}
    doubled = run(oracle.smooth_model(FLOAT), clients(7, 12), fed.FedAvg(), lr=0.1,
                  loss=lambda outputs, y: Doubled.apply(F.cross_entropy(outputs, y)), **options)  # fmt: skip
    plain = run(oracle.smooth_model(FLOAT), clients(7, 12), fed.FedAvg(), lr=0.2, loss=F.cross_entropy, **options)
    assert same_bits(doubled.model, plain.model)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_one_inside_and_the_users_afterwards(threads):
    old_threads, records = torch.get_num_threads(), []

    def loss(out, y):
        records.append(torch.get_num_threads())
        if len(records) > 20:  # after the trial
            raise RuntimeError("enough")
        return F.cross_entropy(out, y)

    torch.set_num_threads(threads)
    try:
        with pytest.raises(fed.ClientError, match="client 0 failed in round .*, local step 0: RuntimeError: enough"):
            run(oracle.smooth_model(FLOAT), clients(9), fed.FedAvg(), rounds=20, loss=loss)
        assert torch.get_num_threads() == threads and set(records) == {1}
    finally:
        torch.set_num_threads(old_threads)


def test_the_model_that_was_handed_over_is_not_changed():
    model = oracle.smooth_model(FLOAT).eval()
    original, addresses = copy.deepcopy(model.state_dict()), [p.data_ptr() for p in model.parameters()]
    result = run(model, clients(9, 9), fed.FedSAM(), rounds=2)
    assert all(torch.equal(v, original[k]) for k, v in model.state_dict().items())
    assert addresses == [p.data_ptr() for p in model.parameters()]
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert not same_bits(result.model, model) and type(result.model) is type(model)
    sizes = [p.untyped_storage().nbytes() for p in result.model.parameters()]
    # no views of a big row: saving one tensor saves one tensor
    assert sizes == [p.numel() * 4 for p in result.model.parameters()]


class Sometimes(nn.Module):
    """Layers that take part in some of the passes: `plan[i % len(plan)]` names the layers of training pass i."""

    def __init__(self, plan):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.plan = plan
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        names = self.plan[self.calls % len(self.plan)] if self.training else "ab"
        self.calls += self.training
        return sum(getattr(self, n)(x) for n in names)


@pytest.mark.parametrize(
    "algorithm",
    [fed.FedAvg(), fed.FedSAM(rho=0.5), fed.FedSAM(rho=0.5, adaptive=True), fed.MoFedSAM(rho=0.5)],
    ids=repr,
)
def test_a_parameter_without_a_gradient_is_left_alone(algorithm):
    """Also by weight decay and momentum; also when only one of the two passes used it: it must not stay perturbed."""
    model = Sometimes(["ab", "b"] if isinstance(algorithm, (fed.FedSAM, fed.MoFedSAM)) else ["b"])
    # one step, because buffers that a perturbed pass changes are not kept
    batch_size = 12 if len(model.plan) == 2 else 4
    options = {"rounds": 1, "participation": 1.0, "weight_decay": 0.1, "momentum": 0.9, "buffers": "keep"}
    options["batch_size"] = batch_size
    final = run(model, clients(12), algorithm, **options).model
    for name in ("a", "never"):
        assert torch.equal(getattr(final, name).weight, getattr(model, name).weight)
    assert not torch.equal(final.b.weight, model.b.weight)


def test_a_parameter_that_only_the_second_pass_uses_is_updated_at_its_own_weights():
    model = Sometimes(["b", "ab"])
    options = {
        "rounds": 1, "participation": 1.0, "lr": 0.1, "batch_size": 12, "backend": "reference", "buffers": "keep",
    }  # fmt: skip
    data = clients(12)
    final = run(model, data, fed.FedSAM(rho=0.5), **options).model
    w = model.b.weight.detach(), model.b.bias.detach()
    loss = F.cross_entropy(model.b(data[0][0]), data[0][1])
    g = torch.autograd.grad(loss, list(model.b.parameters()))
    moved_model = copy.deepcopy(model)
    with torch.no_grad():
        for p, wi, gi in zip(moved_model.b.parameters(), w, g):
            p.copy_(wi + 0.5 * gi / oracle.flat_norm(g))
    moved_model.calls.fill_(1)
    F.cross_entropy(moved_model.train()(data[0][0]), data[0][1]).backward()
    # The order of samples in a batch is shuffled: equal up to rounding.
    torch.testing.assert_close(final.a.weight, model.a.weight - 0.1 * moved_model.a.weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(final.b.weight, model.b.weight - 0.1 * moved_model.b.weight.grad, rtol=1e-5, atol=1e-6)


class Unusual(nn.Module):
    """Tied, frozen, 0-dim, empty and channels-last parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight
        self.scale, self.empty_weight = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Linear(4, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = torch.tanh(self.conv2(torch.tanh(self.conv(x)))).mean((2, 3))
        return self.frozen(self.scale * self.decode(torch.tanh(self.encode(x)))) + self.empty_weight.sum()


@pytest.mark.parametrize("backend", ["auto", "foreach", "reference"])
def test_unusual_parameters(backend):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 1, 5, 5, generator=generator).double(), torch.randint(0, 3, (8,), generator=generator))]
    model = Unusual().double()
    options = {
        "rounds": 3, "participation": 1.0, "batch_size": 4, "lr": 0.2, "momentum": 0.5, "shuffle": False,
        "backend": backend,
    }  # fmt: skip
    final = run(model, data, fed.FedAvg(), **options).model
    plain = copy.deepcopy(model)
    for _ in range(3):
        optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.2, momentum=0.5)
        for dim in (0, 4):
            optimizer.zero_grad()
            F.cross_entropy(plain(data[0][0][dim : dim + 4]), data[0][1][dim : dim + 4]).backward()
            optimizer.step()
    assert oracle.movement(final, plain) < 1e-14
    assert final.decode.weight is final.encode.weight
    assert torch.equal(final.frozen.weight, model.frozen.weight)
    assert final.conv2.weight.stride() == model.conv2.weight.stride()
    assert not torch.equal(final.scale, model.scale)


def test_batch_norm_keep_leaves_the_buffers_of_the_start():
    model = norm_model().double()
    model[1].running_mean += 1
    data = clients(8, 8, dtype=torch.float64)
    final = run(model, data, fed.FedSAM(), rounds=3, buffers="keep", participation=1.0).model
    assert all(torch.equal(a, b) for a, b in zip(final.buffers(), model.buffers(), strict=True))
    assert not same_bits(final, model)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_batch_norm_average_is_the_mean_over_the_clients(weighting):
    model, data = norm_model().double(), clients(4, 12, dtype=torch.float64)
    options = {"rounds": 1, "batch_size": 4, "buffers": "average", "participation": 1.0, "shuffle": False}
    result = run(model, data, fed.FedAvg(), weighting=weighting, **options)
    single_run = [run(model, [c], fed.FedAvg(), **options).model for c in data]
    share = (0.5, 0.5) if weighting == "uniform" else (0.25, 0.75)
    for name in ("running_mean", "running_var"):
        mean = sum(s * getattr(m[1], name) for s, m in zip(share, single_run))
        torch.testing.assert_close(getattr(result.model[1], name), mean, rtol=1e-14, atol=1e-16)
    assert [m[1].num_batches_tracked.item() for m in single_run] == [1, 3]
    assert result.model[1].num_batches_tracked.item() == (2 if weighting == "uniform" else round(0.25 + 0.75 * 3))
    # Two clients send 56 + 18 float64 parameters, and buffers of 10 float64 and one int64.
    assert result.history[0]["megabytes_up"] == pytest.approx(2 * 8 * (35 + 10 + 18 + 10 + 1) / 1e6)


def test_counters_move_to_the_nearest_whole_number():
    options = {"rounds": 1, "batch_size": 4, "buffers": "average", "participation": 1.0}
    final = run(norm_model().double(), clients(4, 8, 8, dtype=torch.float64), fed.FedAvg(), **options).model
    assert final[1].num_batches_tracked.item() == 2  # of 5/3
    assert final[1].num_batches_tracked.dtype == torch.int64


def test_statistics_come_from_the_unperturbed_weights():
    """After one step the running statistics of FedSAM equal FedAvg's for every radius."""
    options = {"rounds": 1, "batch_size": 8, "buffers": "average", "participation": 1.0}
    data, algorithms = clients(8, dtype=torch.float64), (fed.FedSAM(rho=5.0), fed.FedAvg())
    sam, avg = (run(norm_model().double(), data, a, **options).model for a in algorithms)
    assert all(torch.equal(a, b) for a, b in zip(sam.buffers(), avg.buffers(), strict=True))
    assert not same_bits(sam, avg)


def test_a_constant_buffer_needs_no_word():
    model = oracle.smooth_model(FLOAT)
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("table", torch.arange(3.0), persistent=False)
    for buffers in (None, "average"):
        final = run(model, clients(5, 5), fed.FedAvg(), rounds=1, buffers=buffers).model
        assert torch.equal(final.table, model.table) and torch.equal(final.mask, model.mask)
