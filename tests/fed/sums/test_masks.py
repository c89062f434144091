"""Masks: what cancels modulo 2^116 whoever drops, what the server sees, and that nobody is asked for both of a client's
secrets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("Crypto", reason="pycryptodome, of the extra `secure`, is not installed")

from fastsam.fed.sums import masks
from fastsam.fed.sums.masks import Client, Server
from fastsam_kernels.conventions import LOW_BITS
from tests.helpers.mutants.apply import replaced

MODULUS = 1 << (64 + LOW_BITS)


def words(numbers: list[int]) -> Tensor:
    """Numbers modulo 2^116 as the two limbs, and the zero behind them."""
    high, low = [n >> LOW_BITS for n in numbers], [n % (1 << LOW_BITS) for n in numbers]
    return torch.tensor([[*(h - (1 << 64) if h >= 1 << 63 else h for h in high), 0], [*low, 0]])


def values(limbs: Tensor) -> list[int]:
    return [((high << LOW_BITS) + low) % MODULUS for high, low in limbs.T.tolist()]


class Round:
    """Some clients, numbered as one likes, and their server."""

    def __init__(self, numbers: Collection[int], threshold: int) -> None:
        self.clients = {i: Client(i) for i in numbers}
        self.server = Server({i: client.public for i, client in self.clients.items()}, threshold)
        for client in self.clients.values():
            client.deal(list(self.clients.values()), threshold)

    def send(self, words: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """What the server gets."""
        sent = {i: self.clients[i].masked(x, self.server.publics) for i, x in words.items()}
        for i, x in sent.items():
            self.server.receive(i, x)
        return sent

    def unmask(self, dropped: Collection[int] = ()) -> Tensor:
        return self.server.unmask(dropped, self.clients)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_masks_cancel_modulo_2_116_whoever_drops(data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, 99), min_size=2, max_size=5, unique=True))
    threshold = data.draw(st.integers(2, len(numbers)))
    dropped = data.draw(st.sets(st.sampled_from(numbers), max_size=len(numbers) - threshold))
    uploads = {i: data.draw(st.lists(st.integers(0, MODULUS - 1), min_size=3, max_size=3)) for i in numbers}
    stayed = {i: words(upload) for i, upload in uploads.items() if i not in dropped}
    made = Round(numbers, threshold)
    made.send(stayed)
    assert values(made.unmask(dropped)) == [sum(uploads[i][k] for i in stayed) % MODULUS for k in range(3)]


def seen() -> tuple[list[Tensor], Tensor]:
    """What the server of a round gets of four clients with one upload of small numbers, one of which drops, and the sum
    that it makes."""
    upload = words([k % 7 for k in range(3000)])
    made = Round(range(4), 2)
    sent = made.send(dict.fromkeys((0, 2, 3), upload))
    return list(sent.values()), made.unmask({1})


def hidden() -> None:
    """Single words look uniform, and are another's in no place; all together they are three times the upload."""
    sent, total = seen()
    assert values(total) == [3 * (k % 7) for k in range(3000)]
    for limb, bits in ((0, 64), (1, LOW_BITS)):
        assert len({x for one in sent for x in one[limb].tolist()}) == 3 * 3001
        ones = torch.stack([torch.stack([(one[limb] >> k) & 1 for one in sent]) for k in range(bits)]).double()
        # of 9003 bits: five standard deviations are 0.026
        assert (ones.mean(dim=(1, 2)) - 0.5).abs().max() < 0.03
        bytes = Counter(x >> shift & 255 for one in sent for shift in range(0, 48, 8) for x in one[limb].tolist())
        expected = 9003 * 6 / 256
        assert sum((bytes[b] - expected) ** 2 / expected for b in range(256)) < 255 + 6 * (2 * 255) ** 0.5
    differences = sent[0] - sent[1]
    assert len(differences[0].unique()) == 3001  # of no two clients is what is left a number that both hide


def test_the_server_sees_uniform_words_and_their_exact_sum() -> None:
    hidden()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("_add_(out, self._own, 1)", "None"),
        ("if other != self.number:", "if False:"),
        ("if other != self.number:", "if other == 2:"),
        ("mask[1].bitwise_and_((1 << LOW_BITS) - 1)", "mask[1].zero_()"),
        ("mask[1].bitwise_and_((1 << LOW_BITS) - 1)", "mask[:, 1:] = mask[:, :1]"),
        ("1 if one < other else -1", "1"),
        ("bytearray(words.nbytes)", "bytearray(words.nbytes); sign = 0"),
    ],
    ids=["no own mask", "no pairs", "one pair", "low limb bare", "one word for all", "one sign", "only taken out"],
)
def test_what_leaves_a_mask_out_is_noticed(old: str, new: str) -> None:
    with replaced(masks.__name__, old, new), pytest.raises((AssertionError, RuntimeError)):
        hidden()


def test_every_seed_masks_one_upload_or_one_pair_once(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[bytes, int]] = []
    add_ = masks._add_
    monkeypatch.setattr(masks, "_add_", lambda x, seed, sign: (used.append((seed, sign)), add_(x, seed, sign))[1])
    for _ in range(2):  # rounds
        Round(range(4), 2).send({i: words([1]) for i in range(4)})
    signs = {seed: sorted(s for other, s in used if other == seed) for seed, _ in used}
    assert sorted(map(tuple, signs.values())) == sorted([(1,)] * 8 + [(-1, 1)] * 12)


def test_a_dropout_nobody_told_of_is_refused() -> None:
    made = Round(range(4), 2)
    made.send({i: words([5]) for i in (0, 1, 3)})
    with pytest.raises(
        RuntimeError,
        match=r"round 1: the masks of 4 clients do not cancel \(clients \[2\] sent nothing, and nobody told\)",
    ):
        made.unmask()


@pytest.mark.parametrize("dropped", [{1}, set()], ids=["told to have dropped", "sent twice"])
def test_what_was_not_agreed_on_is_refused(dropped: set[int]) -> None:
    made = Round(range(4), 2)
    for _ in range(1 if dropped else 2):
        made.send({i: words([5]) for i in range(4)})
    with pytest.raises(RuntimeError, match="what was sent is not what was agreed on"):
        made.unmask(dropped)


def test_too_few_who_stay_are_refused() -> None:
    made = Round(range(5), 4)
    made.send({i: words([5]) for i in (0, 1, 3)})
    with pytest.raises(
        RuntimeError, match="round 1: 3 of 5 clients stayed, and 4 must.*a smaller secure_sums needs fewer"
    ):
        made.unmask({2, 4})


def test_a_client_hands_out_one_share_of_another_once_and_fewer_than_the_threshold_say_nothing() -> None:
    from Crypto.Protocol.SecretSharing import Shamir

    clients = Round(range(3), 3).clients
    shares = [client.share(1, dropped=True) for client in clients.values()]
    assert Shamir.combine(shares) == clients[1]._secret != Shamir.combine(shares[:2])
    with pytest.raises(KeyError):
        clients[0].share(1, dropped=False)
