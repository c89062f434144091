"""The cost of a local step and of a round of an algorithm, relative to FedAvg. The processes of both take turns.

A local step's cost is a marginal cost. It is the time of a round with `LONG` local epochs less the time of a round with
one, divided by the number of additional steps. The other costs of a round (constants, states, uploads, sums, the
server's step) cancel in that difference, and count in the cost of a round. If one thread trains, the clock is the
process's CPU time.
"""

from dataclasses import replace
from typing import Any

from bench.fed import cores
from bench.fed.race import Entry, turns
from bench.fed.worker import CPU_TIME
from bench.fed.workload import BATCH, SAMPLES, Workload
from bench.timing import ratios, summary

UNIT, LR = "fedavg", 0.05  # with the workload's rate, five epochs of so few clients diverge under SCAFFOLD
ALGORITHMS = ("scaffold", "fedcm", "feddyn", "fedlesam", "fedlesam-s", "fedlesam-d")  # one back-propagation a step
# Options of FedAvg that protect clients. They cost nothing in a local step, so only rounds are compared. Most clients
# are clipped, with epsilon, and it still trains.
PROTECTED = {"fedavg, noise_multiplier": (("privacy", {"clip": 0.15, "noise_multiplier": 0.5}),)}
EXECUTORS = ("sequential", "auto")
LONG = 5  # local epochs of a long round
# Cohort of the short and long rounds whose difference is taken. It makes turns short. The MLP is stacked, so it keeps
# the rows of a normal round.
CLIENTS = {"mlp": 20, "cnn": 4}
ROUNDS = {"mlp": 5, "cnn": 1}  # rounds of each process in a turn


def loads(model: str) -> dict[str, Workload]:
    """Return what is compared with FedAvg, by label."""
    plain = {name: Workload(model, name, lr=LR) for name in ALGORITHMS}
    return plain | {name: Workload(model, UNIT, lr=LR, options=options) for name, options in PROTECTED.items()}


def compare(label: str, load: Workload, executor: str, number: int) -> dict[str, Any]:
    """Return the row of an algorithm: `step` and `round` relative to FedAvg's, and the `seconds` of a local step."""
    few_clients = {"cohort": CLIENTS[load.model]}
    short = "round" if load.cohort == few_clients["cohort"] else "short"
    lengths = (
        {"round": {}} if load.options else {"round": {}, short: few_clients, "long": few_clients | {"epochs": LONG}}
    )
    contender = f"ours:{executor}" + (f":{CPU_TIME}" if executor == "sequential" else "")
    num_cores = 1 if executor == "sequential" else min(2, cores.available())
    entries = [
        Entry(f"{prefix} {name}", contender, replace(one, **options), cores=num_cores)
        for name, options in lengths.items()
        for prefix, one in (("unit", replace(load, algorithm=UNIT, options=())), ("own", load))
    ]
    samples, rows = turns(entries, number, ROUNDS[load.model])
    row: dict[str, Any] = {"name": label, "ours": True}
    if problem := next((f"{one['name']}: {one['problem']}" for one in rows if one.get("problem")), None):
        return row | {"problem": problem}
    row["round"] = ratios(samples.seconds["own round"], samples.seconds["unit round"])
    if load.options:
        return row
    row_seconds, unit = (
        [a - b for a, b in zip(samples.seconds[f"{prefix} long"], samples.seconds[f"{prefix} {short}"], strict=True)]
        for prefix in ("own", "unit")
    )
    steps = CLIENTS[load.model] * (SAMPLES // BATCH) * (LONG - 1)
    return row | {"step": ratios(row_seconds, unit), "seconds": summary([seconds / steps for seconds in row_seconds])}
