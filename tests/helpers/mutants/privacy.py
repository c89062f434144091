"""Wrong noise, wrong clips and wrong accounts: a factor, a sign, an event. Each names the check that must notice it
(`privacy_checks`)."""

from __future__ import annotations

from tests.helpers.mutants.apply import mutants

MUTANTS = mutants(r"""
# the noise on the sum, its denominator, and that of the clients
privacy.mechanism Privacy.aggregate: self.asked.noise_multiplier * self.asked.clip_update => self.asked.noise_multiplier
    @ scales
privacy.mechanism Privacy.aggregate: self.asked.noise_multiplier * self.asked.clip_update => self.asked.noise_multiplier
    * self.asked.clip_update ** 2 @ scales
privacy.mechanism Privacy.aggregate: self.cohort or active => active @ scales
privacy.mechanism Privacy.aggregate: self.cohort or active => active @ denominator
privacy.private_aggregate PrivateAggregate.mean: self._std / self._cohort => self._std @ scales
privacy.private_aggregate PrivateAggregate.mean: self._sums.share(DELTA, self._cohort) => self._sums.mean(DELTA) @
    denominator
privacy.mechanism Privacy.add_to_rows_: self.asked.noise_multiplier * clip => self.asked.noise_multiplier @ local_scale
# all of them the same
privacy.mechanism Privacy.add_to_rows_: normals(rows.shape[1], self.asked.seed, 'local noise', index, i) =>
    normals(rows.shape[1], self.asked.seed, 'local noise', index) @ local_scale
clients.sampling expected: participation * clients => float(clients) @ scales
# the clip
privacy.clip shorten_: (1 - 2 * _OFF) * limit => limit @ clipped
privacy.clip shorten_: norm <= limit => norm <= 2 * limit @ clipped
privacy.clip shorten_: most / norm => most / norm ** 2 @ clipped
# epsilon
privacy.accountant law: dp.PoissonSampledDpEvent(participation, every) => dp.GaussianDpEvent(z) @ poisson
privacy.accountant law: dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(z / 2)) =>
    dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(z)) @ without_replacement
privacy.accountant law: (dp.GaussianDpEvent(z / 2), most(rounds)) => (dp.GaussianDpEvent(z), most(rounds)) @ unsampled
privacy.accountant law: -(-rounds // epoch) => rounds // epoch @ unsampled
privacy.accountant Accountant._epsilons: self._small => -1 @ every_round
privacy.accountant Accountant.__init__: dp.rdp.compute_epsilon([order], [_AT], delta)[0] - _AT =>
    dp.rdp.compute_epsilon([order], [_AT], delta)[0] @ every_round
""")
