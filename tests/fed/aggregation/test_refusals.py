"""Rules that cannot serve, and in which words."""

from typing import Any

from fastsam import fed
from fastsam.fed.aggregation import rule_of
from tests.helpers import fed_runs
from tests.helpers.fed_refusals import refusals


class Summed(fed.Algorithm):
    """An algorithm of a user's that does not say that it has totals."""

    def finish(self, server: Any, client: Any, results: Any, round: Any) -> Any:
        return client, fed.Upload({"delta": results.delta}, {"sum": results.delta})


def run_median(algorithm=None, **options):
    fed_runs.run(algorithm or fed.FedAvg(), "sequential", aggregation="median", **options)


def run_function(function, algorithm=None):
    fed_runs.run(algorithm or fed.FedSAM(), "sequential", aggregation=function)


def mean(rows, weights):
    return (weights[:, None] * rows.double()).sum(0) / weights.sum()


test_refused = refusals(
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
        lambda: run_median(weighting="samples"),
        "aggregation='median' needs clients that count alike, but weighting='samples'.*norm_filter",
    ),
    (lambda: run_median(participation=0.2), "needs 3 clients in a round.* rounds of 2"),
    (lambda: run_median(algorithm=Summed()), r"finish of Summed returned Upload\(sum=...\)"),
    (lambda: run_median(algorithm=fed.FedSMOO()), "the server of FedSMOO"),
    # functions
    (lambda: run_function(lambda rows, weights: rows),
     r"aggregation=<lambda> must return one row, \[\d+\] floats; got torch.float32 \[\d+, \d+\]"),
    (lambda: run_function(lambda rows, weights: 0.0), "aggregation=<lambda> must return one row, .* got float"),
    (lambda: run_function(lambda rows, weights: rows[0] / 0), "aggregation=<lambda> returned NaN or infinity"),
    (lambda: run_function(lambda rows, weights: rows @ weights), "aggregation=<lambda> failed: RuntimeError"),
    (lambda: run_function(mean, fed.SCAFFOLD()), "'mean' needs .*SCAFFOLD.* Use aggregation='mean'"),
    (lambda: run_function(mean, fed.FedDyn()), "'mean' needs .*FedDyn.* Use aggregation='mean'"),
    (lambda: run_function(mean, fed.FedNova()), "'mean' needs .*FedNova.* Use aggregation='mean'"),
)  # fmt: skip
