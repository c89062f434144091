"""The sanitizers find the errors that they are made for; `make test-sanitize` runs the kernels' tests under them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import sanitized
from tests.helpers.building import clean_linux

pytestmark = [
    *clean_linux,
    pytest.mark.slow,
    pytest.mark.skipif(sanitized.why_not() is not None, reason=str(sanitized.why_not())),
]

SOURCE = """
#include <cstdlib>
extern "C" int beyond(int i) { volatile int n = 4; volatile int* p = new int[n]; p[0] = 1; return p[i]; }
extern "C" int too_large(int x) { volatile int y = x; return y + 2147483647; }
"""


@pytest.mark.parametrize(
    ("call", "message"),
    [("beyond(4)", "heap-buffer-overflow"), ("too_large(1)", "signed integer overflow"), ("beyond(0)", None)],
)
def test_a_finding_ends_the_process(tmp_path: Path, call: str, message: str | None) -> None:
    (tmp_path / "wrong.cpp").write_text(SOURCE)
    library = tmp_path / "wrong.so"
    source = tmp_path / "wrong.cpp"
    subprocess.run([sanitized.compiler(tmp_path), "-shared", "-fPIC", source, "-o", library], check=True)
    script = f"import ctypes; ctypes.CDLL({str(library)!r}).{call}"
    options = {"env": sanitized.environment(tmp_path), "capture_output": True, "text": True}
    process = subprocess.run([sys.executable, "-c", script], **options)
    assert (process.returncode == 0) is (message is None) and (message or "") in process.stderr, process.stderr
