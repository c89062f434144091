"""Whole runs under masks: the bits of those without, dropouts and resumed ones too; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastsam import fed
from fastsam.fed.algorithms.base import Upload
from fastsam.fed.loop.round import Cohort
from fastsam.fed.sums import secure
from fastsam.fed.sums.fixed_point import RoundSums
from tests.helpers import fed_runs
from tests.helpers.fed_runs import digest

needs_library = pytest.mark.skipif(
    secure.find_spec("Crypto") is None, reason="pycryptodome, of the extra `secure`, is not installed"
)
ALGORITHMS = [fed.FedAvg(), fed.FedSAM(rho=0.05), fed.SCAFFOLD()]


def run(algorithm: fed.Algorithm | None = None, share: float | None = 0.5, **options: Any) -> fed.Result:
    kept: dict[str, Any] = {"executor": "sequential", "rounds": 2, "participation": 1.0, "sizes": (7, 12, 1, 5, 9)}
    return fed_runs.run(algorithm or fed.FedAvg(), **(kept | options), secure_sums=share)


def raises_for_one(scores: Tensor, y: Tensor) -> Tensor:
    if len(y) == 1:
        raise ValueError("a batch of one")
    loss = F.cross_entropy(scores, y)
    return loss * float("nan") if len(y) == 4 else loss


DROPOUTS: dict[str, Any] = {"loss": raises_for_one, "on_client_error": "exclude", "measures": ("drifts",)}


@needs_library
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("options", [{}, DROPOUTS], ids=["all stay", "two drop"])
def test_masks_change_no_bit(algorithm: fed.Algorithm, options: dict[str, Any]) -> None:
    plain, masked = run(algorithm, None, **options), run(algorithm, **options)
    assert digest(plain) == digest(masked)
    assert [[one["client"] for one in r["excluded"]] for r in masked.history] == [[2, 4] if options else []] * 2


@needs_library
def test_weights_and_buffers_change_no_bit() -> None:
    def made(share: float | None) -> fed.Result:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        return run(
            fed.FedSAM(), share, model=model, sizes=(7, 12, 9), weighting="samples", buffers="average", clip_update=0.05
        )  # fmt: skip

    plain, masked = made(None), made(1.0)
    assert digest(plain) == digest(masked)
    for a, b in zip(plain.model.buffers(), masked.model.buffers(), strict=True):
        assert torch.equal(a, b)


@needs_library
def test_masks_change_no_bit_under_noise() -> None:
    """Displacements are clipped before they are masked, and the server adds its noise to the sum; so does a clip that
    follows their norms."""
    noise = {"clip_update": 0.1, "noise_multiplier": 1.0, "clip_quantile": 0.5, "accountant": None, "sampler": "fixed"}
    plain, masked = (run(fed.FedSAM(), share, **noise, **DROPOUTS) for share in (None, 0.5))
    assert digest(plain) == digest(masked)
    assert plain.history[0]["clip_update"] != plain.history[1]["clip_update"]


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "executor"),
    [
        *((n, "sequential") for n, c in fed.algorithms.registry.items() if not c().pools_data),
        *((n, e) for n in ("fedavg", "scaffold", "fedsmoo") for e in ("vmap", "threads")),
    ],
)
def test_masks_change_no_bit_of_any_algorithm(name: str, executor: str) -> None:
    def made(share: float | None) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.GroupNorm(1, 7), nn.Tanh(), nn.Linear(7, 3))  # FedBN's layers stay
        return digest(run(fed.algorithms.registry[name](), share, executor=executor, model=model, sizes=(7, 12, 3, 5)))

    assert made(None) == made(0.5)


@needs_library
def test_rows_of_several_clients_numbers_and_exclusions_are_those_of_plain_sums() -> None:
    g = torch.Generator().manual_seed(0)
    mean = {"delta": torch.randn(4, 9, generator=g), "a": torch.randn(4, 1, generator=g, dtype=torch.float64)}
    total, numbers = {"c": 1e-7 * torch.randn(4, 2, 3, generator=g)}, {"loss": [1e6, -1e-9, 0.3, 2.0]}
    mean["delta"][2, 3] = 1e30
    weights, problems = [3, 1, 2, 7], {1: "its state is not finite"}
    plain, masked = RoundSums(4, 7), RoundSums(4, 7)
    hidden = secure.SecureSums(masked, 0.5, [8, 3, 5, 4], 7, 0)
    found = plain.add_rows_(weights, mean, total, numbers, problems)
    assert hidden.add_rows_([8, 3, 5, 4], weights, mean, total, numbers, problems) == found and sorted(found) == [1, 2]
    hidden.unmask_({3, 5})
    for name in mean:
        assert torch.equal(plain.mean(name), masked.mean(name))
    assert torch.equal(plain.total("c"), masked.total("c")) and plain.number("loss") == masked.number("loss") == 1e6 + 2
    assert (plain.clients, plain.weight) == (masked.clients, masked.weight) == (2, 10)


@needs_library
def test_a_resumed_run_has_the_same_bits_and_cannot_lay_down_its_masks(tmp_path: Path) -> None:
    whole = run(share=None, rounds=3)
    run(rounds=1, run_dir=tmp_path / "run")
    with pytest.raises(
        fed.RunDirectoryError, match="cannot be resumed with another secure_sums: it was started with 0.5"
    ):
        run(share=None, rounds=3, run_dir=tmp_path / "run", resume=True)
    assert digest(run(rounds=3, run_dir=tmp_path / "run", resume=True)) == digest(whole)


@needs_library
def test_the_server_gets_masked_words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run: the same clients send the same update, and no word of one is a word of another, or of what was
    masked."""
    sent: list[Tensor] = []
    bare: list[Tensor] = []
    receive, masked = secure.Server.receive, secure.Client.masked
    monkeypatch.setattr(
        secure.Server,
        "receive",
        lambda self, client, words: (sent.append(words.clone()), receive(self, client, words))[1],
    )
    monkeypatch.setattr(
        secure.Client,
        "masked",
        lambda self, words, publics: (bare.append(words.clone()), masked(self, words, publics))[1],
    )
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    fed.run(
        nn.Linear(6, 3),
        [(x, y)] * 4,
        fed.SCAFFOLD(),
        rounds=1,
        participation=1.0,
        shuffle=False,
        secure_sums=0.5,
        executor="sequential",
    )
    assert len(sent) == 4 and all(torch.equal(bare[0], x) for x in bare[1:])
    words = torch.stack(sent)
    assert words[0, 0].numel() > 2 * 21 + 4 and len(words.unique()) == words.numel()
    assert not torch.isin(words, bare[0]).any()


@needs_library
def test_a_client_that_is_lost_in_silence_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Cohort.close
    monkeypatch.setattr(Cohort, "close", lambda self, ends: None if 3 in ends.clients else close(self, ends))
    run(share=None, rounds=1)  # which nobody would notice
    with pytest.raises(
        RuntimeError, match=r"round 1: the masks of 5 clients do not cancel \(clients \[3\] sent nothing"
    ):
        run()


@needs_library
def test_too_many_dropouts_end_the_run() -> None:
    with pytest.raises(RuntimeError, match="round 1: 3 of 5 clients stayed, and 4 must"):
        run(share=0.8, **DROPOUTS)


@needs_library
def test_a_client_alone_in_its_round_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="round 2: client 4 is alone in its round.*sampler='fixed' draws as many"):
        run(sampler=lambda t, generator: [0, 3] if t == 0 else [4])


@needs_library
def test_clients_that_upload_other_names_end_the_run() -> None:
    class Own(fed.FedAvg):
        def close_client(self, server: Any, client: Any, ends: Any, round: Any) -> Any:
            more = {"more": ends.displacement} if ends.clients[0] == 3 else {}
            return client, Upload({"delta": ends.displacement, **more})

    with pytest.raises(ValueError, match="same names and shapes, got 'delta'.*'more'.*from client 3 after 'delta'"):
        run(Own())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"aggregation": "median"},
            "secure_sums=0.5 .* aggregation='median' looks at single uploads: use aggregation='mean'",
        ),
        ({"algorithm": fed.Centralised_SGD()}, "secure_sums=0.5 hides clients.*Centralised_SGD has none"),
        (
            {"participation": 0.2, "sampler": "fixed"},
            "needs 2 clients in a round.*rounds of 1; use a larger participation",
        ),
        ({"share": 0.0}, "secure_sums .* must be a finite number > 0 and <= 1, got 0.0"),
        ({"share": True}, "secure_sums .* must be a finite number > 0 and <= 1, got True"),
    ],
    ids=["median", "centralised", "one client", "0", "True"],
)
def test_what_has_no_meaning_is_refused_before_the_run(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_several_processes_are_refused() -> None:
    with pytest.raises(ValueError, match="secure_sums=0.5 is simulated in one process, and this run has 2"):
        secure.check_secure_sums(0.5, "mean", fed.FedAvg(), 5, 2)


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pycryptodome, which is not installed: pip install 'fastsam\\[secure\\]'"):
        run()
    run(share=None, rounds=1)
