"""Masks that cancel in a sum: the clients of a round add them to what they send, and the server learns the sum alone.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal and Seth, "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017 (Figure 4, all parties honest but curious). What client i sends is
integers modulo 2^116, the two limbs of `fixed_point`:

    y_i = x_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)
    sum_i y_i - sum_i PRG(b_i) = sum_i x_i,    to the last bit

s_ij: a secret that clients i and j agree on (X25519, HKDF); b_i: client i's own. PRG: AES-128 in counter mode. Every
client deals out shares (Shamir) of b_i and of its key. Of who stayed, the others then hand out the shares of b_i; of
who dropped those of its key, which gives the masks that nothing cancels; never both of one. All of it is
pycryptodome's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastsam.fed.sums.fixed_point import FixedPointSum
from fastsam_kernels.conventions import LOW_BITS

_BYTES = 16  # of a secret, and of a key of the cipher: what `Shamir` shares
Share = tuple[int, bytes]


class Client:
    """What one client of one round knows: its secrets, and its shares of the others'."""

    def __init__(self, number: int) -> None:
        from Crypto.Random import get_random_bytes

        self.number = number
        self._secret, self._own = get_random_bytes(_BYTES), get_random_bytes(_BYTES)
        self.public = _private(self._secret).public_key()
        self._held: dict[int, tuple[Share, Share]] = {}

    def deal(self, clients: Sequence[Client], threshold: int) -> None:
        """Gives every client, itself too, a share of its key and one of its own mask; `threshold` of them are needed to
        know either."""
        from Crypto.Protocol.SecretSharing import Shamir

        made = [Shamir.split(threshold, len(clients), secret) for secret in (self._secret, self._own)]
        for other, shares in zip(clients, zip(*made, strict=True), strict=True):
            other._held[self.number] = shares

    def masked(self, words: Tensor, publics: Mapping[int, Any]) -> Tensor:
        """What it sends of `words`, int64 `[2, n]`: uniform to whoever lacks its secrets. publics: the keys of all
        clients of the round."""
        out, key = words.clone(), _private(self._secret)
        _add_(out, self._own, 1)
        for other, public in publics.items():
            if other != self.number:
                _add_(out, _agreed(key, public), _sign(self.number, other))
        return out

    def share(self, of: int, dropped: bool) -> Share:
        """Its share of the key of a client that dropped, or of the own mask of one that stayed. Raises KeyError when it
        is asked again."""
        key, own = self._held.pop(of)
        return key if dropped else own


class Server:
    """What the server of a round holds: everybody's public key, who has sent, and the sum of what came."""

    def __init__(self, publics: Mapping[int, Any], threshold: int, round: int = 0) -> None:
        self.publics, self.threshold, self.round = publics, threshold, round
        self.received: list[int] = []
        self._sum: Tensor | None = None

    def receive(self, client: int, words: Tensor) -> None:
        """Masked words, int64 `[2, n]`, `0 <= low < 2^52`, the last of which is a masked zero."""
        self.received.append(client)
        if self._sum is None:
            self._sum = torch.zeros_like(words)
        _limbs(self._sum).add_limbs_(*words)

    def unmask(self, dropped: Collection[int], clients: Mapping[int, Client]) -> Tensor:
        """The sum of what the clients sent, without masks, int64 `[2, n - 1]`. dropped: those of whom it is known; the
        others answer.

        Raises RuntimeError when too few are there to answer, or when masks are left: somebody is missing of whom nobody
        told.
        """
        from Crypto.Protocol.SecretSharing import Shamir

        there, n = [i for i in self.received if i not in dropped], len(self.publics)
        if self._sum is None or len(there) < self.threshold:
            raise RuntimeError(
                f"round {self.round + 1}: {len(there)} of {n} clients stayed, and {self.threshold} must, so that the "
                f"masks of those who dropped "
                "can be taken out; a smaller secure_sums needs fewer"
            )
        for i in self.publics:
            secret = Shamir.combine([clients[j].share(i, i in dropped) for j in there[: self.threshold]])
            if i not in dropped:
                _add_(self._sum, secret, -1)
                continue
            key = _private(secret)
            for j in there:
                _add_(self._sum, _agreed(key, self.publics[j]), -_sign(j, i))
        if self._sum[:, -1].any():
            lost = sorted(self.publics.keys() - {*self.received, *dropped})
            reason = (
                f"clients {lost} sent nothing, and nobody told" if lost else "what was sent is not what was agreed on"
            )
            raise RuntimeError(
                f"round {self.round + 1}: the masks of {n} clients do not cancel ({reason}): their sum is noise, and "
                f"the round is refused"
            )
        return self._sum[:, :-1]


def _sign(one: int, other: int) -> int:
    """With which client `one` adds the mask that it shares with `other`."""
    return 1 if one < other else -1


def _add_(words: Tensor, seed: bytes, sign: int) -> None:
    """Adds the mask of a seed to words, or takes it out, modulo 2^116."""
    from Crypto.Cipher import AES

    stream = bytearray(words.nbytes)
    AES.new(seed, AES.MODE_CTR, nonce=b"").encrypt(bytes(words.nbytes), output=stream)
    mask = torch.frombuffer(stream, dtype=torch.int64).view(words.shape)
    mask[1].bitwise_and_((1 << LOW_BITS) - 1)
    _limbs(words).add_limbs_(*(mask if sign > 0 else mask.neg_()))


def _limbs(words: Tensor) -> FixedPointSum:
    return FixedPointSum(words[0], 1, words)


def _private(secret: bytes) -> Any:
    """The X25519 key of a secret."""
    from Crypto.PublicKey import ECC

    return ECC.construct(curve="Curve25519", seed=_derived(secret, 2 * _BYTES))


def _agreed(private: Any, public: Any) -> bytes:
    """The seed of the mask that two clients share: the same from either side."""
    from Crypto.Protocol.DH import key_agreement

    return key_agreement(static_priv=private, static_pub=public, kdf=partial(_derived, size=_BYTES))


def _derived(secret: bytes, size: int) -> bytes:
    from Crypto.Hash import SHA256
    from Crypto.Protocol.KDF import HKDF

    made = HKDF(secret, size, b"", SHA256)
    assert isinstance(made, bytes)  # a tuple where several keys are asked for
    return made
