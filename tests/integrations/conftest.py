"""Results of the marked tests, written to the file that FASTSAM_COMPATIBILITY names (`make test-integrations`)."""

import json
import os
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import pytest

from tests.helpers.places import ROOT
from tests.integrations.report import KIND, PACKAGES

_rows: dict[str, dict[str, str]] = {}  # by test; several cases of one test are a row


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    report: pytest.TestReport = yield
    mark = item.get_closest_marker("shows")
    if mark is not None and (report.when == "call" or not report.passed):
        library, feature, result = mark.args
        test = f"{item.path.relative_to(ROOT).as_posix()}::{getattr(item, 'originalname', item.name)}"
        row = _rows.setdefault(
            test, {"library": library, "feature": feature, "result": result, "outcome": "passed", "test": test}
        )
        if not report.passed:
            row["outcome"] = report.outcome
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("FASTSAM_COMPATIBILITY")
    if not path or session.config.option.collectonly:
        return
    versions = {name: metadata.version(name) for name in ("torch", *filter(None, PACKAGES.values()))}
    day = datetime.now(timezone.utc).date().isoformat()
    record = {"kind": KIND, "date": day, "versions": versions, "rows": list(_rows.values())}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=1) + "\n")
