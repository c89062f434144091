"""Wrong noise, wrong clips and wrong accounts: a factor, a sign, an event. Each names the check that must notice it
(`privacy_checks`)."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """In module `fastsam.fed.<module>`, `new` for `old`."""

    module: str
    old: str
    new: str
    check: str


P = "privacy."

MUTANTS = [
    # the noise on the sum, its denominator, and that of the clients
    Mutant(P + "mechanism", "multiplier * self.asked.clip_update", "multiplier", "scales"),
    Mutant(P + "mechanism", "multiplier * self.asked.clip_update", "multiplier * self.asked.clip_update**2", "scales"),
    Mutant(P + "mechanism", "self.cohort or active", "active", "scales"),
    Mutant(P + "mechanism", "self.cohort or active", "active", "denominator"),
    Mutant(P + "private_sums", "self._std / self._cohort", "self._std", "scales"),
    Mutant(P + "private_sums", "self._sums.share(DELTA, self._cohort)", "self._sums.mean(DELTA)", "denominator"),
    Mutant(P + "mechanism", "self.asked.noise_multiplier * clip", "self.asked.noise_multiplier", "local_scale"),
    Mutant(P + "mechanism", '"local noise", index, i)', '"local noise", index)', "local_scale"),  # all of them the same
    Mutant("clients.sampling", "return participation * clients", "return float(clients)", "scales"),
    # the clip
    Mutant(P + "clip", "(1 - 2 * _OFF) * limit", "limit", "clipped"),
    Mutant(P + "clip", "1.0 if norm <= limit", "1.0 if norm <= 2 * limit", "clipped"),
    Mutant(P + "clip", "most / norm ", "most / norm**2 ", "clipped"),
    # epsilon
    Mutant(P + "accountant", "PoissonSampledDpEvent(participation, every)", "GaussianDpEvent(z)", "poisson"),
    Mutant(P + "accountant", "cohort, dp.GaussianDpEvent(z / 2))", "cohort, dp.GaussianDpEvent(z))",
        "without_replacement"),
    Mutant(P + "accountant", "(dp.GaussianDpEvent(z / 2), most", "(dp.GaussianDpEvent(z), most", "unsampled"),
    Mutant(P + "accountant", "-(-rounds // epoch)", "rounds // epoch", "unsampled"),
    Mutant(P + "accountant", "<= self._small", "<= -1", "every_round"),
    Mutant(P + "accountant", "[_AT], delta)[0] - _AT", "[_AT], delta)[0]", "every_round"),
]  # fmt: skip
