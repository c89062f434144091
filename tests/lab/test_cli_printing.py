"""The `fastsam` command when it only prints: help, version, lists, warnings, and the modules that it imports for
them."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from pytest import CaptureFixture, MonkeyPatch

import fastsam
from fastsam.lab import cli
from fastsam.lab.cli_help import TOPICS
from tests.helpers.places import ROOT


def test_info_shows_versions_and_every_backend(capsys: CaptureFixture) -> None:
    import torch

    from fastsam import backends

    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^torch +{re.escape(torch.__version__.split('+')[0])}", out, re.M)
    assert re.search(r"^numpy +\d", out, re.M)
    for backend in backends.table():
        line = next(line for line in out.splitlines() if re.match(rf"{backend.name} +{backend.device} ", line))
        assert (" yes" in line) == backend.available and (backend.available or backend.reason in line)


def test_info_says_how_the_libraries_were_built_and_what_the_driver_serves(
    capsys: CaptureFixture, monkeypatch: MonkeyPatch
) -> None:
    from fastsam import backends

    monkeypatch.setattr(backends, "libraries", lambda: ("built a.so; its CUDA 13.0 needs driver 580 or newer", "12.4"))
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^cuda .*a driver for CUDA 12\.4 and older$", out, re.M)
    assert re.search(r"^libraries +built a\.so; its CUDA 13\.0 needs driver 580 or newer$", out, re.M)


def test_info_as_json_says_the_same(capsys: CaptureFixture) -> None:
    from fastsam import backends

    assert cli.main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert [(b["name"], b["device"], b["available"]) for b in info["backends"]] == [
        (b.name, b.device, b.available) for b in backends.table()
    ]
    assert info["auto"] == backends.backend() and info["advice"] and info["versions"]["numpy"]


def test_a_printed_config_repeats_the_run(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--rounds", "7", "--algorithm", "fedsam", "--rho", "0.3"]
    assert cli.main(["run", str(ROOT / "examples" / "digits.toml"), *words, "--print-config"]) == 0
    output = capsys.readouterr().out
    Path("config.json").write_text(output)
    assert json.loads(output)["rounds"] == 7 and not Path("runs").exists()
    assert cli.main(["run", "config.json", "--print-config"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(output)
    assert cli.main(["compare", "config.json", "--algorithms", "fedavg,fedsam", "--print-config"]) == 0
    assert json.loads(capsys.readouterr().out)["compare"]["algorithms"] == ["fedavg", "fedsam"]


def test_help_lists_every_key_and_algorithm(capsys: CaptureFixture) -> None:
    from fastsam.fed import algorithms
    from fastsam.lab.run_config import KEYS

    def help_text(*words: str) -> str:
        with pytest.raises(SystemExit) as error:
            cli.main(["run", "--help", *words])
        assert error.value.code == 0
        return capsys.readouterr().out

    full_text = help_text("all")
    for name in [*KEYS, *algorithms.registry]:
        assert re.search(rf"^  {name} ", full_text, re.M), name
    pages = [help_text(topic) for topic in TOPICS if topic != "all"]
    assert "".join(pages) == full_text and len(help_text().splitlines()) < 40
    assert re.search(r"^  alpha ", pages[0], re.M) and not re.search(r"^  rounds ", pages[0], re.M)
    with pytest.raises(SystemExit):
        cli.main(["run", "--help", "date"])
    assert "did you mean 'data'?" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_keys(shell: str, capsys: CaptureFixture) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["--print-completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("reproduce", "--local-epochs", "--print-config", "float64"))
    if shell == "bash":
        assert "_run_pos_0_COMPGEN=_shtab_compgen_files" in text and "_run_dir_COMPGEN=_shtab_compgen_dirs" in text
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize("command", ["run", "compare", "reproduce", "info"])
@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_the_terminal(monkeypatch: MonkeyPatch, capsys: CaptureFixture, command: str, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        cli.main([command, "--help", *(["all"] if command in ("run", "compare") else [])])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    keys = [line for line in lines if re.match(r"  (name|classes_per_client|clients_per_domain|fedavg) ", line)]
    assert len({re.match(r"  \w+ +", line).end() for line in keys}) <= 1


def test_no_command_prints_help_and_version_prints_the_version(capsys: CaptureFixture) -> None:
    assert cli.main([]) == 2
    assert "run" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"fastsam {fastsam.__version__}\n"


@pytest.mark.parametrize("command", [["info"], ["run", "small.toml"], ["run", "--help", "all"]])
def test_without_torch_the_message_is_clear(command: list[str]) -> None:
    code = f"import sys; sys.modules['torch'] = None\nfrom fastsam.lab.cli import main\nsys.exit(main({command!r}))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 1
    assert "fastsam needs PyTorch: pip install 'torch>=2.10'" in process.stderr and "Traceback" not in process.stderr


def test_a_warning_is_one_line(capsys: CaptureFixture, monkeypatch: MonkeyPatch) -> None:
    def warn(arguments: object, flags: object) -> int:
        warnings.warn("the kernels are not built", stacklevel=1)
        return 0

    monkeypatch.setattr(cli, "info", warn)
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().err == "warning: the kernels are not built\n"


IMPORTS = """
import sys
import fastsam
assert "fastsam.fed" not in sys.modules
from fastsam import fed
assert fed is sys.modules["fastsam.fed"]
print({"matplotlib", "sklearn", "rich", "triton", "scipy"} & set(sys.modules))
import fastsam.lab.cli, fastsam.lab.config, fastsam.lab.experiment
import fastsam.lab.compare, fastsam.lab.sweep, fastsam.lab.report
import fastsam.fed.measures, fastsam.fed.data, fastsam.fed.models, fastsam.lab.plots
print({"matplotlib", "sklearn", "rich"} & set(sys.modules))
"""


def test_modules_are_imported_when_asked_for_and_heavy_libraries_when_needed() -> None:
    process = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["set()", "set()"]


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], {"torch", "numpy", "rich"}),
        (["reproduce", "--list"], {"torch", "numpy", "matplotlib", "sklearn"}),
    ],
)
def test_what_only_prints_starts_at_once(words: list[str], heavy: set[str]) -> None:
    code = (
        f"import atexit, sys\natexit.register(lambda: print({heavy!r} & set(sys.modules)))\nfrom fastsam.lab.cli "
        f"import main\nmain({words!r})"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0 and process.stdout.endswith("set()\n"), process.stdout[-200:] + process.stderr
