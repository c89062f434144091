"""What is said when torch's compiler fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fastsam.fed.executors import compiler


def test_other_errors_pass_as_they_are() -> None:
    for error in (RuntimeError("mine"), ValueError("mine")):
        with pytest.raises(type(error)) as raised, compiler.explained_errors():
            raise error
        assert raised.value is error


def test_a_broken_file_in_the_compilers_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What torch says of a library that a killed linker left empty; the end about TORCH_LOGS helps nobody here."""
    from torch._inductor.exc import InductorError  # here: it takes seconds, in every worker

    def broken(*arguments: object, **options: object) -> None:
        error = InductorError(ImportError("a.so: file too short"), None)
        error.args = (error.args[0] + "\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace",)
        raise error

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_alone", lambda: broken)
    with pytest.raises(RuntimeError) as raised:
        compiler.compile_graph(torch.fx.symbolic_trace(nn.ReLU()), [torch.zeros(2)])
    assert str(raised.value) == (
        "torch.compile failed: ImportError: a.so: file too short\nIf a compilation was killed before, its half-written "
        "files "
        f"are in the way: delete the directory {tmp_path} and run again; or use compile=False"
    )
    assert isinstance(raised.value.__cause__, InductorError)


def test_a_torch_without_the_compiler_alone_compiles_with_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def compile(traced: torch.fx.GraphModule, **how: object) -> torch.fx.GraphModule:
        given.append(how)
        return traced

    monkeypatch.setattr(compiler, "_alone", lambda: None)
    monkeypatch.setattr(torch, "compile", compile)
    x = torch.full((3,), -1.0)
    function = compiler.compile_graph(torch.fx.symbolic_trace(nn.ReLU()), [x])
    options = given[0].pop("options")
    assert given == [{"fullgraph": True, "dynamic": False}] and isinstance(options, dict) and options["cpp_wrapper"]
    assert function(x).tolist() == [0, 0, 0]
