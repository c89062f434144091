"""Wrong noise, wrong clips and wrong accounts: a factor, a sign, an event. Each names the check that must notice it
(`privacy_checks`)."""

from tests.helpers.mutants.apply import mutants

MUTANTS = mutants(r"""
# the noise on the sum, its denominator, and that of the clients
stages.noise Noise.__init__: settings.privacy.noise_multiplier * settings.privacy.clip =>
    settings.privacy.noise_multiplier @ scales
stages.noise Noise.__init__: settings.privacy.noise_multiplier * settings.privacy.clip =>
    settings.privacy.noise_multiplier * settings.privacy.clip ** 2 @ scales
stages.noise CentralNoise.process_aggregate: self.cohort or round.cohort_size => round.cohort_size @ scales
stages.noise CentralNoise.process_aggregate: self.cohort or round.cohort_size => round.cohort_size @ denominator
stages.noise PrivateAggregate.mean: self._std / self._cohort => self._std @ scales
stages.noise PrivateAggregate.mean: self._sums.share(DELTA, self._cohort) => self._sums.mean(DELTA) @
    denominator
stages.noise Noise.__init__: settings.privacy.noise_multiplier * settings.privacy.clip =>
    settings.privacy.noise_multiplier @ local_scale
# all of them the same
stages.noise LocalNoise.process_results: normals(rows.shape[1], seed, 'local noise', round.index, i) =>
    normals(rows.shape[1], seed, 'local noise', round.index) @ local_scale
clients.sampling expected_size: participation * clients => float(clients) @ scales
# the clip
stages.clip shorten_: (1 - 2 * _OFF) * limit => limit @ clipped
stages.clip shorten_: norm <= limit => norm <= 2 * limit @ clipped
stages.clip shorten_: target / norm => target / norm ** 2 @ clipped
# epsilon
privacy.accountant privacy_events: dp.PoissonSampledDpEvent(participation, gaussian_event) =>
    dp.GaussianDpEvent(z) @ poisson
privacy.accountant privacy_events: dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(z / 2)) =>
    dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(z)) @ without_replacement
privacy.accountant privacy_events: (dp.GaussianDpEvent(z / 2), max_participations(rounds)) =>
    (dp.GaussianDpEvent(z), max_participations(rounds)) @ unsampled
privacy.accountant privacy_events: -(-rounds // epoch) => rounds // epoch @ unsampled
privacy.accountant Accountant._epsilons: self._small => -1 @ every_round
privacy.accountant Accountant.__init__: dp.rdp.compute_epsilon([order], [_AT], delta)[0] - _AT =>
    dp.rdp.compute_epsilon([order], [_AT], delta)[0] @ every_round
""")
