"""The backend that `auto` selects, and the messages if the compiled kernels are missing."""

import re
import warnings
from dataclasses import replace

import pytest
import torch

from fastsam import FusedSAM, backends
from fastsam_kernels import build, libraries, native

CPU = torch.device("cpu")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A plain install: no compiled kernels, and nothing said about it yet."""
    table = tuple(replace(b, why_not=lambda: "not built") if b.name == "native" else b for b in backends.BACKENDS)
    monkeypatch.setattr(backends, "BACKENDS", table)
    monkeypatch.setattr(backends, "_has_warned", False)
    for module in (native, libraries):
        monkeypatch.setattr(module, "why_not", lambda device: "not built")
    return monkeypatch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_auto_takes_foreach_where_nothing_is_compiled(without_kernels: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    with pytest.warns(UserWarning, match="without its compiled kernels"):
        assert backends.select("auto", CPU, dtype).name == "foreach"
    assert backends.select("reference", CPU, dtype).name == "reference"


@pytest.mark.parametrize("call", ["select", "FusedSAM"])
def test_the_note_names_the_users_line(without_kernels: pytest.MonkeyPatch, call: str) -> None:
    with pytest.warns(UserWarning, match="without its compiled kernels") as output:
        if call == "select":
            backends.select("auto", CPU, torch.float32)
        else:
            FusedSAM([torch.nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=0.1)
    assert output[0].filename == __file__


def test_auto_never_takes_the_reference() -> None:
    for device in ("cpu", "cuda"):
        names = [b.name for b in backends.table() if b.device == device]
        assert names.index("native") < names.index("foreach") < names.index("reference")
        (foreach,) = (b for b in backends.table() if (b.name, b.device) == ("foreach", device))
        assert foreach.available == (device == "cpu" or torch.cuda.is_available())


def test_the_note_names_a_missing_compiler_once(without_kernels: pytest.MonkeyPatch) -> None:
    reason = "no C++ compiler: install one"
    without_kernels.setattr(build, "why_not", lambda: reason)
    table = [b for b in backends.BACKENDS if b.name != "native"]
    plain_install = replace(
        backends.BACKENDS[0], name="native", device="cpu", why_not=lambda: f"installed without: {reason}"
    )
    without_kernels.setattr(backends, "BACKENDS", (plain_install, *table))
    with pytest.warns(UserWarning, match="without its compiled kernels") as output:
        backends.select("auto", CPU, torch.float32)
    assert str(output[0].message).count(reason) == 1 and "python -m fastsam_kernels.build" in str(output[0].message)


def test_the_note_comes_once_with_the_command(without_kernels: pytest.MonkeyPatch) -> None:
    without_kernels.setattr(build, "why_not", lambda: None)
    with pytest.warns(UserWarning, match=re.escape("`python -m fastsam_kernels.build` builds them")) as output:
        backends.select("auto", CPU, torch.float32)
    assert len(output) == 1 and "native: not built" in str(output[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backends.select("auto", CPU, torch.float32)


def test_the_name_of_the_backend_is_given_without_the_note(without_kernels: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.backend("cpu") == "foreach"
    with pytest.warns(UserWarning, match="without its compiled kernels"):
        backends.select("auto", CPU, torch.float32)


def test_without_a_compiler_the_note_names_what_to_install(without_kernels: pytest.MonkeyPatch) -> None:
    without_kernels.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning) as output:
        backends.select("auto", CPU, torch.float32)
    (note,) = (str(w.message) for w in output)
    assert "no-such-compiler not found on PATH" in note and "apt-get install g++" in note
    assert "then run `python -m fastsam_kernels.build`" in note


def test_a_backend_that_is_named_says_nothing(without_kernels: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.select("foreach", CPU, torch.float32).name == "foreach"
    with pytest.raises(RuntimeError, match="native: not built"):
        backends.select("native", CPU, torch.float32)
