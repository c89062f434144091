"""The page of compatible trainers has the results of the last record, and every marked test."""

import ast
import copy
import json
from pathlib import Path

import pytest

from tests.helpers.places import ROOT
from tests.integrations.report import PACKAGES, PAGE, table


def read_marks() -> dict[str, tuple[str, ...]]:
    """Return the marks `shows` in the sources, by test."""
    marks = {}
    for path in sorted((ROOT / "tests" / "integrations").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.shows":
                    test = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                    marks[test] = tuple(ast.literal_eval(argument) for argument in mark.args)
    return marks


def test_the_page_is_its_record() -> None:
    record = PAGE.read(PAGE.results)
    assert PAGE.path.read_text() == PAGE.fill(PAGE.path.read_text(), record)


def test_the_record_has_every_marked_test_as_it_is_marked() -> None:
    rows = {row["test"]: (row["library"], row["feature"], row["result"]) for row in PAGE.read(PAGE.results)["rows"]}
    assert rows == read_marks()
    assert {library for library, *_ in rows.values()} == set(PACKAGES)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"outcome": "failed"}, "is failed: a page is made"), ({"result": "silently wrong"}, "shows .*silently wrong")],
)
def test_no_page_is_made_of_a_failure(change: dict[str, str], message: str, tmp_path: Path) -> None:
    record = copy.deepcopy(PAGE.read(PAGE.results))
    record["rows"][0] |= change
    (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message):
        PAGE.read(tmp_path / "record.json")


def test_a_row_shows_the_version_that_was_tried() -> None:
    record = PAGE.read(PAGE.results)
    row = record["rows"][0]
    version = record["versions"][PACKAGES[row["library"]]]
    section = table(record).partition(f"**{row['library']} {version}**")[2].partition("**")[0]
    assert f"- {row['feature']}: *{row['result']}*\n" in section
