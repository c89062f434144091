"""The writer of tables and pages: pages have the numbers of the files, and every figure has its place."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import plots, report
from bench import record as records
from tests.helpers.bench_machine import record_of

pytestmark = pytest.mark.of_each_kind


def summary(value: float) -> dict[str, float]:
    return {"median": value, "q1": 0.9 * value, "q3": 1.1 * value}


def case(part: str, *rows: dict[str, Any], title: str = "a case", **facts: Any) -> dict[str, Any]:
    return {
        "part": part, "name": title, "title": title, **facts,
        "rows": [{"title": r["name"], "ours": True, **r} for r in rows],
    }  # fmt: skip


def federated_record(device: str = "cpu") -> dict[str, Any]:
    """Return a record with every part and every way to fail."""
    fast = {"name": "fastsam, vmap", "speed": summary(3.21), "seconds": summary(0.1), "peak_mib": 231.4, "at": 10.0}
    cost_row = {"name": "fedcm", "step": summary(1.0312), "round": summary(1.0312)}
    gpu = {"name": "graph, 4", "executor": "graph", "at": 4, "seconds": 0.0123}
    parts = [
        case("speed-1", fast, {"name": "flower", "ours": False, "problem": "no | actors\nat all"}, title="MLP, fedavg"),
        case("growth", fast, {"name": "lost", "problem": "no memory"}, title="by clients", axis="clients"),
        case("overhead", cost_row, {"name": "hidden", "round": summary(1.03)}),
        case("share", {"name": "loop", "own_share": 0.034, "seconds": 0.5}),
        case("gpu", gpu, {"name": "vmap, 8", "absent": "no time left"}),
    ]
    return record_of("federated", *parts, device=device)


def test_pages_hold_what_was_measured() -> None:
    for path, text in report.pages().items():
        assert text == path.read_text(), f"{path.name} differs from the results: python -m bench.report --publish"
    names = {name for path in report.pages() for name in report.places(path.read_text())}
    expected = {f"bench:{name}" for name in ("step", "variants", "kernels", "federated", "evidence")}
    assert expected | {f"bench:{name}-cuda" for name in ("variants", "kernels", "federated")} <= names


def test_pages_show_results_only() -> None:
    words = ("Not measured", "not measured:", "no time left", "no time was left", "not reached")
    assert not [(path.name, word) for path, text in report.pages().items() for word in words if word in text]


def test_every_table_is_written_as_csv_and_tex(tmp_path: Path) -> None:
    slow = {"name": "a | b", "step": summary(12e-6), "round": summary(1.0)}
    record = record_of("federated", case("share", {"name": "x", "seconds": 0.5}), case("overhead", slow, title="100 %"))
    records.write(record, tmp_path / "federated.json")
    assert report.main([str(tmp_path / "federated.json"), "--tables", str(tmp_path / "tables")]) == 0
    names = ["federated-01.csv", "federated-01.tex", "federated-02.csv", "federated-02.tex"]
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == names
    head, row = (tmp_path / "tables" / "federated-02.csv").read_text().splitlines()
    assert head.startswith(',"seconds of a local step, FedAvg = 1",quartiles') and row.startswith("a | b,0.000,")
    tex = (tmp_path / "tables" / "federated-02.tex").read_text()
    assert tex.startswith("% 100 %\n\\begin{tabular}{lrlrl}\n") and r"a \textbar{} b & 0.000" in tex


def test_the_published_tables_are_written_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert report.main(["--tables", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    for path in report.published():
        number = len(report.tables_in(report.markdown(records.read(path))))
        assert number and len(list(tmp_path.glob(f"{path.stem}-[0-9]*.csv"))) == number
        assert len(list(tmp_path.glob(f"{path.stem}-[0-9]*.tex"))) == number


def test_a_row_of_a_table_is_a_line_of_its_file(tmp_path: Path) -> None:
    rows = [{"name": "a", "times": [1.0, 2.5]}, {"name": "b", "grid": [{"rho": 0.1}]}]
    record = record_of("federated", case("gpu", *rows, rounds=3))
    records.write(record, tmp_path / "federated.json")
    text = (tmp_path / "federated.json").read_text()
    assert json.loads(text) == record and '\n   "rounds": 3,\n   "rows": [\n' in text
    lines = [line.strip().rstrip(",") for line in text.splitlines()]
    assert {json.dumps(row) for row in records.rows(record)} <= {*lines}
    for path in records.RESULTS.glob("*.json"):
        content = path.read_text()
        assert content == f"{records.text(json.loads(content))}\n", f"{path.name} was not written by bench.record.write"


def test_published_results_were_all_measured() -> None:
    record = records.read(records.RESULTS / "step.json")
    assert [case["part"] for case in record["cases"]] == ["step"] * 6 + ["whole"] * 3
    assert {row["name"] for row in records.rows(record) if records.has_failed(row)} == {"fastsam_triton"}


def test_other_places_and_the_rest_of_a_page_are_left() -> None:
    text = "before\n<!-- bench:step -->\nold\n<!-- /bench -->\nafter <!-- gpu:x -->\nold\n<!-- /gpu -->\n"
    page = report.fill(text, {"bench:step": "new"})
    assert page == text.replace("old", "new", 1) and report.fill(page, {"bench:step": "new"}) == page


@pytest.mark.parametrize("content", ["not json", "[]", '{"kind": "something else"}'])
def test_a_foreign_file_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step.json").write_text(content)
    assert report.main([str(tmp_path / "step.json")]) == 1 and "expected" in capsys.readouterr().err


@pytest.mark.parametrize("shows_picture", [True, False])
def test_publishing_stores_the_file_and_writes_its_pages(
    shows_picture: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a page without a place\n")
    picture = "![growth](../bench/results/federated.png)\n" if shows_picture else ""
    (tmp_path / "docs" / "a.md").write_text(f"<!-- bench:federated -->\nold\n<!-- /bench -->\n{picture}")
    (tmp_path / "new.json").write_text(json.dumps(federated_record()))
    assert report.main([str(tmp_path / "new.json"), "--publish"]) == 0
    page = (tmp_path / "docs" / "a.md").read_text()
    for text in (
        "Rounds per second on one core; the bare loop is 1:", "| | MLP, FedAvg |", "| fastsam, vmap | 3.21 |",
        "- by clients: fastsam, vmap 3.21\n", "| FedCM | 1.03 |", "- a case: loop 3.4%", "| graph, 4 | 12.3 |",
        "Made by `python -m bench made-up` on 2031-02-03, commit `0123456789ab+changes`; a GPU;",
    ):  # fmt: skip
        assert text in page, text
    assert not [word for word in ("no time left", "flower", "vmap, 8", "lost") if word in page]
    full = report.markdown(federated_record())
    for text in (
        "| fastsam, vmap | 3.21 | 2.89–3.53 | 231 MiB |", "| flower | failed | failed | failed |",
        "| fedcm | 1.031 | 0.928–1.134 | 1.031 | 0.928–1.134 |", "| hidden | – | – | 1.030 | 0.927–1.133 |",
        "| loop | 3.4% | 0.500 |", "Not measured: vmap, 8: no time left.",
    ):  # fmt: skip
        assert text in full, text
    assert (tmp_path / "federated.json").exists() and (tmp_path / "federated.png").exists() == shows_picture
    assert plots.draw(record_of("federated"), tmp_path) == []


def test_quick_figures_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    (tmp_path / "new.json").write_text(json.dumps({**federated_record(), "quick": True}))
    assert report.main([str(tmp_path / "new.json"), "--publish"]) == 1
    assert "measured with --quick" in capsys.readouterr().err and not (tmp_path / "results").exists()


def test_a_part_of_the_stored_figures_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "pages", dict)
    old, new = federated_record(), federated_record()
    new["cases"] = [case for case in new["cases"] if case["part"] == "speed-1"]
    stored_file, new_file = tmp_path / "results" / "federated.json", tmp_path / "new.json"
    stored_file.parent.mkdir()
    stored_file.write_text(json.dumps(old))
    new_file.write_text(json.dumps(new))
    assert report.main([str(new_file), "--publish"]) == 1
    assert "has no cases of gpu, growth" in capsys.readouterr().err
    assert report.main([str(stored_file), str(new_file), "--publish"]) == 0
    assert len(json.loads(stored_file.read_text())["cases"]) == len(old["cases"])


def test_tables_of_a_gpu(tmp_path: Path) -> None:
    """Replayed figures before eager ones, launches and host times."""

    def timing(seconds: float) -> dict[str, Any]:
        return {"seconds": summary(seconds), "fraction": summary(0.5), "to": {"foreach": summary(0.5)}}

    row = {"name": "native", "eager": timing(3e-6), "replayed": timing(2e-6), "launches": 3}
    row |= {"host_seconds": {"unchanged": 3e-5, "changed": 3.5e-5}, "extra_bytes_per_parameter": 8.0}
    size = {"size": "50k", "tensors": 20, "parameters": 51_994, "copy": summary(4e12), "rounds": 3}
    op = case(
        "ops", row, {"name": "triton", "problem": "it raised"}, title="50 k", op="norm", layout="scattered", **size
    )
    step = case("steps", row, title="50 k", **size)
    record = record_of("kernels", op | {"bytes_per_parameter": 4}, step, device="cuda", left_out=["inner-30m-flat"])
    text = report.markdown(record)
    assert "| norm | 4 | native | 0.50 (2.0 µs) |" in text and "Cases for which no time was left: 1." in text
    assert "**50 k: 20 tensors, 51,994 parameters; 3 rounds; copy at 4000.0 GB/s**" in text
    assert "| **native** | 0.50 | 3.0 µs | 0.50 | 2.0 µs | 0.50 | 0.50 | 3 | 30.0 µs | 35.0 µs | 8.0 |" in text
    assert "Not measured: triton: it raised." in text
    assert [path.name for path in plots.draw(record, tmp_path)] == ["roofline-cuda.png"]


def made(record: dict[str, Any], **facts: str) -> dict[str, Any]:
    """Return the record as if it had been made at another commit or on another day."""
    return {**record, "environment": {**record["environment"], **facts}}


LATER = {"day": {"date": "2031-02-04T00:00:00+00:00"}, "commit": {"commit": "fedcba9876543210"}}


@pytest.mark.parametrize("facts", LATER.values(), ids=LATER)
def test_rows_of_other_days_and_commits_are_not_put_into_one_ratio(
    facts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, ours = {"name": "loop", "seconds": 2.0}, {"name": "ours", "seconds": 1.0}
    first = record_of("federated", case("gpu", loop, title="by clients"))
    later = [
        made(record_of("federated", case("gpu", *rows, title=title)), **facts)
        for rows, title in (([ours], "by clients"), ([ours], "by samples"), ([loop, ours], "by clients"))
    ]
    for name, record in zip(("first", "ours", "other_case", "both"), (first, *later), strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(record))

    def join(*names: str) -> int:
        return report.main([str(tmp_path / f"{name}.json") for name in names])

    words = f"gpu/by clients: rows of commit 0123456789ab.changes on 2031-02-03 .*{next(iter(facts.values()))[:10]}"
    for names in (("first", "ours"), ("first", "other_case", "ours"), ("ours", "first")):
        assert join(*names) == 1
    assert re.search(words, capsys.readouterr().err)
    assert join("first", "other_case") == join("first", "both", "ours") == 0


def test_accuracies_of_other_days_are_joined() -> None:
    first, second = (record_of("evidence", case("methods", {"name": name, "steps": {}})) for name in ("SAM", "GSAM"))
    record = records.join(first, made(second, **LATER["day"]))
    assert [row["name"] for row in records.rows(record)] == ["SAM", "GSAM"]


def test_calls_add_up(tmp_path: Path) -> None:
    """A later result replaces an earlier one, a later failure does not; calls on two machines are kept apart."""
    good_row, better, failed_row = (
        {"name": "a", "seconds": 1},
        {"name": "a", "seconds": 2},
        {"name": "a", "problem": "red"},
    )
    first, second, third = (record_of("kernels", case("ops", row)) for row in (good_row, failed_row, better))
    second["cases"].append(case("ops", {"name": "b", "seconds": 3}, title="another"))
    record = records.join(records.join(first, second), third)
    assert [row.get("seconds") for row in records.rows(record)] == [2, 3] and len(record["added"]) == 2
    other_kind = record_of("kernels")
    other_kind["environment"]["machine"]["gpus"] = ["another GPU"]
    with pytest.raises(ValueError, match="another GPU, torch 2.13 cannot be added to a record of"):
        records.join(record, other_kind)
