"""Imports of a config: files of the user and packages named by --trust, never the standard library.

A resumed run lists them first.
"""

import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from fastsam.lab import cli
from fastsam.lab.import_paths import import_object
from fastsam.lab.trust import trust_names

OWN = """
import os
from os import system
from subprocess import run as start
import numpy as np
def make():
    x, y = np.eye(6, 4, dtype=np.float32), np.arange(6) % 2
    return [(x, y), (x[:3], y[:3])], (x, y)
"""
CONFIG = "data = 'own.py:make'\nmodel = 'mlp'\nrounds = 1\nparticipation = 1.0\nexecutor = 'sequential'\n"


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a new folder with a module and a config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own.toml").write_text(CONFIG)
    return tmp_path


STANDARD = sysconfig.get_path("stdlib")
NEVER = [
    "os:system", "posix:system", "subprocess:run", "builtins:eval", "builtins:exec", "shutil:rmtree",
    "importlib:import_module", "runpy:run_path",
    "os.path:join", f"{STANDARD}/os.py:system", "own.py:system", "own:system", "own.py:start",
]  # fmt: skip


@pytest.mark.parametrize("path", NEVER)
@pytest.mark.parametrize("key", ["data", "model", "loss", "sampler", "augment", "algorithm"])
def test_the_standard_library_is_never_imported(key: str, path: str, cwd: Path, capsys: pytest.CaptureFixture) -> None:
    (cwd / "bad.toml").write_text(f"{'' if key == 'data' else CONFIG.replace(key, '# ' + key)}\n{key} = {path!r}\n")
    assert cli.main(["run", "bad.toml", "--trust", "own"]) == 1
    error = capsys.readouterr().err
    assert f"error: {key}: " in error and "the standard library, and a config may not use it" in error
    assert not (cwd / "runs").exists()


def test_a_command_in_the_options_of_a_data_function_does_not_run(cwd: Path) -> None:
    (cwd / "bad.toml").write_text("data = 'os:system'\n[data_options]\ncommand = 'touch ran'\n")
    assert cli.main(["run", "bad.toml"]) == 1
    assert not (cwd / "ran").exists()


@pytest.mark.parametrize("name", ["os", "builtins", "subprocess"])
def test_the_standard_library_cannot_be_trusted(name: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", "own.toml", "--trust", name]) == 1
    assert f"--trust {name}: a config may not use the standard library" in capsys.readouterr().err


def test_an_installed_package_must_be_named(capsys: pytest.CaptureFixture) -> None:
    command = ["run", "own.toml", "--loss", "torch.nn.functional:cross_entropy", "--run-dir"]
    assert cli.main([*command, "a"]) == 1
    error = capsys.readouterr().err
    assert "loss: the package torch (" in error and "If you trust it, add --trust torch" in error
    assert cli.main([*command, "b", "--trust", "numpy"]) == 1
    assert cli.main([*command, "c", "--trust", "torch"]) == 0


def test_a_config_cannot_trust(cwd: Path, capsys: pytest.CaptureFixture) -> None:
    (cwd / "bad.toml").write_text("trust = ['torch']\n" + CONFIG)
    assert cli.main(["run", "bad.toml"]) == 1
    assert "unknown key 'trust'" in capsys.readouterr().err


def test_what_is_found_out_is_found_out_before_the_import(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is in an installation's folder and would create a file if it were imported."""
    package = cwd / "lib" / "site-packages" / "leaves"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("open('left', 'w')\ndef make(): pass\n")
    monkeypatch.syspath_prepend(str(package.parent))
    for path in ("leaves:make", "leaves.inner:make", "lib/site-packages/leaves/__init__.py:make"):
        with pytest.raises(ValueError, match="data: .*leaves.* add --trust "):
            import_object(path, "data")
    assert not (cwd / "left").exists() and "leaves" not in sys.modules
    with trust_names("leaves"):
        assert import_object("leaves:make", "data").__name__ == "make"
    assert (cwd / "left").exists()
    del sys.modules["leaves"]


IMPORTED = """
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
import torch
from torch import load, nn, no_grad, tensor
started = partial(load, "a")
cached = lru_cache(load)
without_graph = no_grad()(load)
read = torch.package.PackageImporter.load_pickle
opened = nn.Linear(2, 2).load_state_dict

class Own(nn.Linear):
    def make(self): pass
made, ready = Own(2, 2), nn.Linear(2, 2)
method = made.make
inherited = made.load_state_dict
here = partial(Own.make, made)

@no_grad()
def decorated(): pass

@lru_cache
def kept(): pass

@contextmanager
def managed(): yield

@wraps(load)
def around(*a): pass
"""


@pytest.mark.parametrize(
    "name", ["load", "started", "cached", "without_graph", "read", "opened", "inherited", "tensor"]
)
def test_a_name_that_was_imported_into_ones_own_file_is_its_packages(name: str, cwd: Path) -> None:
    (cwd / "imported.py").write_text(IMPORTED)
    for path in (f"imported.py:{name}", f"imported:{name}"):
        with pytest.raises(ValueError, match=f"data: {path} is .*, which is not defined in your own file"):
            import_object(path, "data")
        with trust_names("torch"):
            import_object(path, "data")
    del sys.modules["imported"]


@pytest.mark.parametrize("name", ["Own", "made", "ready", "method", "here", "decorated", "kept", "managed", "around"])
def test_what_is_defined_in_ones_own_file_is_ones_own(name: str, cwd: Path) -> None:
    (cwd / "imported.py").write_text(IMPORTED)
    assert import_object(f"imported.py:{name}", "data") is not None


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system knows no owners of files")
def test_a_file_of_somebody_else_must_be_named(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = cwd / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    path = f"{cwd / 'own.py'}:make"
    assert import_object(path, "data")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(
        ValueError, match="own.py is not your own file; look at it, and if you trust it add --trust /.*own.py"
    ):
        import_object(path, "data")
    for trusted_path in (cwd / "own.py", cwd):
        with trust_names(str(trusted_path)):
            assert import_object(path, "data")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system knows no owners of files")
def test_a_run_of_somebody_else_is_resumed_when_its_imports_were_looked_at(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(["run", "own.toml", "--run-dir", "theirs"]) == 0
    command = ["run", "theirs/config.json", "--run-dir", "theirs", "--resume", "--rounds", "2"]
    assert json.loads((cwd / "theirs" / "config.json").read_text())["data"] == "own.py:make"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    capsys.readouterr()
    (cwd / "own.py").write_text(OWN + "open('ran', 'w')\n")
    sys.modules.pop(f"fastsam_user_{cwd / 'own.py'}", None)
    assert cli.main(command) == 1
    error = capsys.readouterr().err
    assert "was made by another user" in error and "data imports own.py:make" in error and "add --trust own.py" in error
    assert not (cwd / "ran").exists()
    assert cli.main([*command, "--trust", "own.py"]) == 0
    assert (cwd / "ran").exists() and "data imports own.py:make" in capsys.readouterr().err


def test_a_resumed_run_shows_what_it_imports(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", "own.toml", "--run-dir", "mine"]) == 0
    assert "imports" not in capsys.readouterr().err
    assert cli.main(["run", "mine/config.json", "--run-dir", "mine", "--resume", "--rounds", "2"]) == 0
    assert capsys.readouterr().err.startswith("data imports own.py:make\n")
