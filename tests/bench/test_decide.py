"""The measurements that decide about a GPU: their order, the rows of a second call, and rows that are not built yet."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import carry, gpu, report
from bench import record as records
from bench.fed import decide, decide_rows, decisions, equal_bits, steady
from bench.fed.decide_rows import LAUNCHER, ROWS
from bench.fed.setting import PLAIN, QUICK, Row, Setting, Sizes
from fastsam.fed.executors import graph, streams
from fastsam.fed.executors.cuda import CaptureError
from fastsam.fed.sums import ranks
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.places import ROOT

CPU = Setting("cpu", QUICK)
of_each_kind = pytest.mark.of_each_kind


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors for GPUs run on a stand-in for CUDA."""
    monkeypatch.setattr(streams, "Cuda", FakeCuda)
    monkeypatch.setattr(streams, "why_not", lambda setup: None)
    monkeypatch.setattr(steady, "Cuda", FakeCuda)


# ---- the parts and their rows


@of_each_kind
def test_parts_are_measured_in_the_order_of_their_importance() -> None:
    assert [part.name for part in decide.PARTS] == [f"M{i}" for i in range(1, 10)] == list(ROWS)
    assert list(decisions.FINDINGS) == list(ROWS)
    for make in ROWS.values():
        for setting in (Setting("cuda", Sizes()), CPU):
            names = [row.name for row in make(setting)]
            assert names and len(set(names)) == len(names)
    slots = [row.name for row in ROWS["M2"](Setting("cuda", Sizes())) if row.name.startswith("graph, ")]
    assert sorted(int(name.split()[1]) for name in slots) == [1, 2, 4, 8, 16, 31]


@of_each_kind
def test_what_is_not_built_starts_to_run_when_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = next(row for row in ROWS["M2"](CPU) if row.name.startswith("graphs of"))
    monkeypatch.delattr(graph, decide_rows.STEPS, raising=False)
    assert lanes.missing() == "executors/graph.py has no GRAPH_STEPS"
    monkeypatch.setattr(graph, decide_rows.STEPS, 8, raising=False)
    assert lanes.missing() == ""
    monkeypatch.setattr(decide_rows.torch.cuda, "device_count", lambda: 1)
    one, two = list(ROWS["M8"](Setting("cuda", Sizes())))[:2]
    monkeypatch.setattr(ranks, "local_device", lambda: decide_rows.torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    assert one.missing() == "" and two.missing() == "rank 1 of a machine takes GPU 1, of 1"
    monkeypatch.setattr(ranks, "local_device", lambda: decide_rows.torch.device("cuda", 0))
    assert two.missing() == ""


@of_each_kind
def test_a_row_says_why_it_has_no_figures() -> None:
    def refuse(seconds: float) -> dict[str, Any]:
        raise ValueError("executor 'graph' cannot serve here: dropout")

    def fail(seconds: float) -> dict[str, Any]:
        raise ValueError("rounds must be an integer")

    refused, failed = (decide_rows.measure_row(Row("name", work), 1.0) for work in (refuse, fail))
    assert refused["absent"] == "not built: executor 'graph' cannot serve here: dropout"
    assert failed["problem"] == "ValueError: rounds must be an integer"


@of_each_kind
def test_a_process_ends_after_an_error_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(seconds: float) -> dict[str, Any]:
        raise CaptureError("the step cannot be captured")

    answers: list[Any] = []
    table = [Row("first", lambda seconds: {"seconds": seconds}), Row("second", fail), Row("third", fail)]
    monkeypatch.setattr(decide_rows, "ROWS", {"M2": lambda setting: iter(table)})
    monkeypatch.setattr(decide_rows, "answers", lambda: answers.append)
    monkeypatch.setattr(decide_rows.torch, "set_num_threads", int)
    monkeypatch.chdir(ROOT)
    decide_rows.main(["M2", "cpu", "60", "1", '["first", "second", "third"]'])
    assert [answer and answer["name"] for answer in answers] == ["first", "second", None]
    assert 0 < answers[0]["seconds"] <= 60 and "CaptureError" in answers[1]["problem"]
    answers.clear()
    decide_rows.main(["M2", "cpu", "0", "1", '["first"]'])
    assert answers[0]["absent"] == "no time left"


@of_each_kind
@pytest.mark.usefixtures("stand_in")
def test_bits_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_bits, "CLIENTS", 2)
    assert equal_bits.compare("cpu", "BatchNorm", "graph") == {"equal": True, "difference": 0.0}
    equal_bits._plain_state.cache_clear()
    different = iter([0.0, 1.0, 1.5])
    monkeypatch.setattr(equal_bits, "_state", lambda *names: equal_bits.torch.tensor([next(different)]))
    assert equal_bits.compare("cpu", "BatchNorm", "graph") == {"equal": False, "difference": 1.5}
    equal_bits._plain_state.cache_clear()


@of_each_kind
@pytest.mark.usefixtures("stand_in")
def test_rounds_of_graphs_are_steady() -> None:
    row = next(iter(ROWS["M2"](CPU)))
    figures = row.work(60)
    assert FakeCuda.graphs and len(figures["times"]) == QUICK.rounds


# ---- a call


class FakeProcess:
    """A process whose rows have figures. It dies at the row "dies", and its executor refuses the row "dropout"."""

    started: list[list[str]]

    def __init__(self, names: list[str]) -> None:
        self.names = iter([*names, None])
        FakeProcess.started.append(names)

    def answer(self, patience: float) -> Any:
        name = next(self.names)
        if name == "dies":
            raise RuntimeError("out of memory")
        result = {"absent": f"not built: graph {decide_rows.REFUSAL}"} if name == "dropout" else {"seconds": 1.0}
        return name and {"name": name, "title": name, "ours": True, **result}

    def close(self) -> None: ...


def row(name: str, kind: str = PLAIN, missing: Callable[[], str] = str, **figures: Any) -> Row:
    return Row(name, lambda seconds: figures, kind, missing)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Row]]:
    """Rows by part, which a test may change. Processes only pretend to measure."""
    table = {
        "M1": [row("FedAvg", LAUNCHER, equal=True)],
        "M2": [row("dies"), row("dropout"), row("later", missing=lambda: "lanes"), row("c")],
    }
    FakeProcess.started = []
    monkeypatch.setattr(decide, "ROWS", {name: lambda setting, name=name: iter(table.get(name, ())) for name in ROWS})
    monkeypatch.setattr(
        decide_rows, "start", lambda part, kind, setting, seconds, names, tree: FakeProcess(list(names))
    )
    monkeypatch.setattr(decide.environment, "commit", lambda: "first")
    return table


def call(folder: Path, code: int) -> dict[str, Any]:
    """Run the command and return the rows of its file by name."""
    assert decide.main(["--device", "cpu", "--out", str(folder), "--against", str(folder / "no tree")]) == code
    return {one["name"]: one for one in records.rows(records.read(folder / "decide.json"))}


@of_each_kind
def test_a_second_call_measures_what_the_first_one_lacks(
    tmp_path: Path, rows: dict[str, list[Row]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = call(tmp_path, 1)
    assert result["dies"]["problem"] == "out of memory" and result["later"]["absent"] == "not built: lanes"
    assert FakeProcess.started == [["dies", "dropout", "c"], ["dropout", "c"]] and result["c"]["seconds"] == 1.0
    assert "later: not built: lanes" in capsys.readouterr().out
    rows["M1"] = [row("FedAvg", LAUNCHER, equal=False)]  # which is not measured again
    rows["M2"][2] = row("later")
    result = call(tmp_path, 1)
    assert result["FedAvg"]["equal"] and result["later"]["seconds"] == 1.0
    assert FakeProcess.started[2:] == [["dies", "later"], ["later"]], "the same package refuses dropout again"
    monkeypatch.setattr(decide.environment, "commit", lambda: "second")
    call(tmp_path, 1)
    assert FakeProcess.started[4:] == [["dies", "dropout"], ["dropout"]]
    assert (tmp_path / "decisions.md").read_text().count("\n") == 2 + len(ROWS)


@of_each_kind
def test_nothing_is_measured_after_unequal_bits(tmp_path: Path, rows: dict[str, list[Row]], capsys: Any) -> None:
    rows["M1"] = [row("FedAvg", LAUNCHER, equal=True), row("FedSAM", LAUNCHER, equal=False)]
    assert set(call(tmp_path, 1)) == {"FedAvg", "FedSAM"} and not FakeProcess.started
    assert "stopped: FedSAM without the bits of `sequential`" in capsys.readouterr().out


@of_each_kind
def test_rows_without_time_are_named(tmp_path: Path, rows: dict[str, list[Row]]) -> None:
    assert decide.main(["--device", "cpu", "--out", str(tmp_path), "--seconds", "1"]) == 1
    result = {one["name"]: one["absent"] for one in records.rows(records.read(tmp_path / "decide.json"))}
    assert {result[name] for name in ("FedAvg", "dies", "dropout", "c")} == {"no time left"} and not FakeProcess.started


def test_a_real_call_on_the_cpu(tmp_path: Path) -> None:
    """Tiny sizes. Executors for GPUs refuse, and the other executors have figures."""
    command = [sys.executable, "-m", "bench.fed.decide", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    record = records.read(tmp_path / "decide.json")
    assert [case["part"] for case in record["cases"]] == list(ROWS)
    assert all(one.get("absent", "not built").startswith("not built") for one in records.rows(record))
    figures = {(case["part"], one["name"]): one for case in record["cases"] for one in case["rows"] if "times" in one}
    assert {part for part, _ in figures} == {"M4", "M5", "M7", "M8", "M9"}
    assert figures["M8", "2 processes"]["seconds"] > 0 and figures["M9", "vmap"]["functions"]
    assert "M8" in report.markdown(record) and "M8" in report.short(record)


# ---- decisions


def finding(part: str, **rows: Any) -> tuple[str, str]:
    found = decisions.FINDINGS[part]({name: {"name": name} | value for name, value in rows.items()})
    assert found is not None
    return found


@of_each_kind
def test_decisions_follow_from_figures() -> None:
    def seconds(**values: float) -> Any:
        return {name: {"seconds": value} for name, value in values.items()}

    assert finding("M1", FedAvg={"equal": True}, FedSAM={"equal": False}) == ("unequal: FedSAM", "stop")
    lanes = {"graph, 8 slots": {"seconds": 0.03}, "graph, 31 slots": {"seconds": 0.05}}
    lanes |= {"other tree, 31 slots": {"seconds": 0.06}}
    assert finding("M2", **lanes)[1] == "keep this tree (0.50 of its time)"
    lanes["other tree, 31 slots"] = {"seconds": 0.02}
    assert finding("M2", **lanes)[1] == "go back to the other tree (1.50 of its time)"
    for at_once, decision in ((1.2, "1.2 < 2: turn to fewer kernels"), (7.0, "7.0 >= 2: lanes pay")):
        busy = {"graph, 8 lanes": {"kernels": 9, "at_once": at_once, "busy": 0.5}}
        assert finding("M3", **busy)[1] == decision
    times = {8: (0.9, 1.0), 16: (0.7, 1.0), 31: (0.5, 1.0)}
    rows = {f"CNN, {e}, {n} clients": t for n, pair in times.items() for e, t in zip(("vmap", "graph"), pair)}
    assert finding("M4", **seconds(**rows))[1] == "`vmap` for CNNs from 16 clients on"
    assert finding("M4", **seconds(**rows | {"CNN, vmap, 31 clients": 0.9}))[1] == "`graph` for CNNs"
    assert finding("M5", **seconds(graph=2.0, sequential=1.0))[1] == "take sequential"
    epochs = {"10 slots": 2.0, "5 slots": 1.5, "7x7 stem, bfloat16": 1.0, "3x3 stem": 4.0, "3x3 stem, no TF32": 4.0}
    assert finding("M6", **seconds(**epochs))[1] == "5 slots; worth it: 7x7 stem, bfloat16"
    for four, decision in ((0.6, "keep them"), (0.7, "leave them out")):
        assert finding("M8", **seconds(**{"1 process": 1.0, "4 processes": four}))[1] == decision
    assert decisions.table({"cases": []}).rows[0] == ["M1", "not measured: not tried", "open"]
    rows = [{"name": "FedAvg", "equal": True}, {"name": "dicts", "absent": "not built: dicts"}]
    text = decisions.text({"cases": [{"part": "M1", "rows": rows}]})
    assert text.startswith("M1: go on\n    1 equal to `sequential` (1 rows not measured)\n")


# ---- what is carried


@of_each_kind
def test_libraries_that_were_compiled_elsewhere_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, kernels = tmp_path / "carried", tmp_path / "kernels"
    source.mkdir(), kernels.mkdir()

    gpu.take_libraries(tmp_path / "nothing was carried", kernels)
    for folder, names in ((source, (gpu.REPORT, "lib.so", gpu.ARCHITECTURES)), (kernels, (gpu.REPORT, "lib.so"))):
        for name in names:
            (folder / name).write_text(f"{folder.name} 9.0")
    gpu.take_libraries(source, kernels)
    assert (kernels / "lib.so").read_text() == "kernels 9.0" and gpu.is_for("8.0", kernels)
    (kernels / gpu.REPORT).unlink()
    gpu.take_libraries(source, kernels)
    assert (kernels / "lib.so").read_text() == "carried 9.0"
    assert gpu.is_for("9.0", kernels) and not gpu.is_for("8.0", kernels)
    facts = {"machine": {"gpus": ["A100"], "capability": "8.0"}, "backends": {"native/cuda": "available"}}
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert not gpu.absent(gpu.PARTS[0], facts, "")
    facts["machine"]["capability"] = "9.0"
    assert gpu.absent(gpu.PARTS[0], facts, "") == "the libraries are built from these sources"


@pytest.fixture
def exported(tmp_path: Path) -> Iterator[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("the sources have no history to export a commit from")
    carry.export("HEAD", tmp_path / "against", tmp_path / "no libraries")
    yield tmp_path / "against"


@of_each_kind
def test_another_tree_serves_its_own_package(exported: Path) -> None:
    code = (
        "import bench.fed, fastsam, fastsam_kernels; print(fastsam.__file__, fastsam_kernels.__file__, bench.__file__)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=exported, env=environment, capture_output=True, text=True, check=True)
    places = [Path(text) for text in result.stdout.split()]
    assert [path.is_relative_to(exported) for path in places] == [True, True, False]
    assert len((exported / carry.COMMIT_FILE).read_text().strip()) == 40
