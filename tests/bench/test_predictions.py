"""The predictions: arithmetic in bytes and launches that agrees with the kernels' sources, and a column for what is
measured."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench import predictions
from bench.fed.workload import BATCH, Workload
from bench.kernel_cases import KERNEL_SIZES, OPS
from tests.helpers.bench_machine import record_of
from tests.helpers.places import ROOT


@pytest.mark.of_each_kind
def test_launches_are_those_of_the_table_that_a_kernel_takes() -> None:
    """`capacity` of csrc/cuda/common.cuh, and the number of list operands of each launcher."""
    source = (ROOT / "csrc" / "cuda" / "common.cuh").read_text()
    limit, other = (
        int(re.search(rf"{name} = (\d+)", source)[1])  # type: ignore[index]
        for name in ("kArgumentLimit", "kOtherArguments")
    )
    assert "(bytes - kOtherArguments - 16) / (3 * sizeof(int) + 2 + 2 * sizeof(int64_t) + lists * 16)" in source
    assert {n: (limit - other - 16) // (30 + 16 * n) for n in (1, 2, 3)} == predictions.LARGE
    assert {op.function for op in OPS.values()} - set(predictions.LISTS) == {"accumulate_"}
    assert predictions.launches("norm_", 707) == 1 and predictions.launches("norm_", 708) == 2
    assert predictions.launches("update_", 1000) == 2 and predictions.launches("accumulate_", 1000) == 1


def test_a_kernel_is_its_launches_its_latency_and_its_bytes() -> None:
    size = KERNEL_SIZES["100m"]
    assert predictions.kernel_seconds("norm", size) == pytest.approx(4e8 / 4.3e12 + 5e-6)
    assert predictions.step_seconds(size, "H100") == pytest.approx(40e8 / 2.9e12 + 12e-6)
    small = [1e6 * predictions.kernel_seconds(op, KERNEL_SIZES["50k"]) for op in ("norm", "perturb", "update")]
    assert small == pytest.approx([5, 3.5, 3.5], abs=0.3)
    fraction = 4e8 / 4.3e12 / predictions.kernel_seconds("norm", size)
    assert fraction > 0.94, "the goal for 100 M parameters is one that launches allow"


@pytest.mark.of_each_kind
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_operations_of_a_pass_are_counted(model: str) -> None:
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Count.seen += not func.is_view and func is not torch.ops.aten.detach.default
            return func(*args, **(kwargs or {}))

    load = Workload(model, clients=1)
    made, (x, y) = load.make_model(), load.tensors()[0]
    with Count():
        torch.nn.functional.cross_entropy(made(x[:BATCH]), y[:BATCH]).backward()
    assert abs(Count.seen - predictions.OPERATIONS[model]) <= 2
    assert len(list(made.parameters())) == predictions.PARAMETERS[model]


@pytest.mark.of_each_kind
def test_the_last_column_is_what_the_file_says() -> None:
    assert predictions.tables({}).count("not measured") > 50
    row = {"name": "native", "replayed": {"seconds": {"median": 12.34e-6}}}
    case = {"name": "norm-100m-scattered", "rows": [row]}
    step = {"size": "resnet18", "rows": [row | {"name": "fastsam_native"}]}
    series = [{"title": "CNN, fedsam, by clients", "name": "graph", "at": 100, "seconds": 0.0125}]
    e = record_of()["environment"]
    run = {"machine": e["machine"], "commit": e["commit"], "command": "c", "parts": {"gpu": {"series": series}}}
    filled = predictions.tables({"kernels": record_of(device="cuda", ops=[case], steps=[step]), "federated": run})
    assert re.search(r"\| `norm` \| 100 M \| 4 \| 1 \| 142\.9 \| 98\.0 \| 12\.3 \|", filled)
    assert re.search(r"\| step \| ResNet-18, 11\.2 M \| [\d.]+ \| [\d.]+ \| 12\.3 \|", filled)
    assert re.search(r"\| CNN, fedsam \| graph \| [\d.]+ \| 12\.5 \|", filled)
    assert filled.count("Measured on a GPU, commit `0123456789ab`") == 2
