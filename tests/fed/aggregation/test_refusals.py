"""Rules that cannot serve, and in which words."""

from typing import Any

import pytest

from fastsam import fed
from fastsam.fed.aggregation import rule_of
from tests.helpers import fed_runs
from tests.helpers.fed_refusals import refusals


class Summed(fed.Algorithm):
    """An algorithm of a user's that does not say that it has totals."""

    def finish_client(self, server: Any, client: Any, results: Any, round: Any) -> Any:
        return client, fed.Upload({"delta": results.delta}, {"sum": results.delta})


def median(algorithm=None, **options):
    fed_runs.run(algorithm or fed.FedAvg(), "sequential", aggregation="median", **options)


@refusals(
    # names that are not rules
    (lambda: rule_of("medain"), "aggregation must be one of .*'median'.*did you mean 'median'"),
    (lambda: rule_of("median:3"), "takes no number"),
    (lambda: rule_of("krum:x"), "'krum:SHARE' takes a number after the colon, got 'krum:x'"),
    (lambda: rule_of("trimmed_mean:0.6"), "share must be .*<= 0.5"),
    (lambda: rule_of("norm_filter:0.5"), "factor must be .*>= 1"),
    (lambda: rule_of("norm_filter:nan"), "factor must be a finite number"),
    (lambda: rule_of("mean:2"), "aggregation must be one of"),
    (lambda: rule_of(None), "aggregation must be one of"),
    # options that a rule excludes
    (
        lambda: median(weighting="samples"),
        "aggregation='median' needs clients that count alike, but weighting='samples'.*norm_filter",
    ),
    (lambda: median(participation=0.2, sampler="fixed"), "needs 3 clients in a round.* rounds of 2"),
    (lambda: median(algorithm=Summed()), r"finish_client of Summed returned Upload\(sum=...\)"),
    (lambda: median(algorithm=fed.FedSMOO()), "the server of FedSMOO"),
)
def test_refused(call, words, error):
    with pytest.raises(error, match=words):
        call()
