"""What is said when torch's compiler fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor.exc import InductorError

from fastsam.fed.executors import compiled, inductor


def test_other_errors_pass_as_they_are() -> None:
    for error in (RuntimeError("mine"), ValueError("mine")):
        with pytest.raises(type(error)) as raised, inductor.compiling():
            raise error
        assert raised.value is error


def test_a_broken_file_in_the_compilers_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What torch says of a library that a killed linker left empty; the end about TORCH_LOGS helps nobody here."""

    def broken(*arguments: object) -> None:
        error = InductorError(ImportError("a.so: file too short"), None)
        error.args = (error.args[0] + "\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace",)
        raise error

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    steps = compiled.Steps.__new__(compiled.Steps)
    steps._made = {("kind", ("z",), (2, 8), (2, 4, 3), (2, 4), 4): broken}
    with pytest.raises(RuntimeError) as raised:
        steps.run_("kind", {"z": torch.zeros(2, 8)}, torch.zeros(2, 1, 8), torch.zeros(2, 4, 3), torch.zeros(2, 4), 4)
    assert str(raised.value) == (
        "torch.compile failed: ImportError: a.so: file too short\nIf a compilation was killed before, its half-written files "
        f"are in the way: delete the directory {tmp_path} and run again; or use compile=False"
    )
    assert isinstance(raised.value.__cause__, InductorError)
