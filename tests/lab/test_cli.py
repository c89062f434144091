"""The `fastsam` command: results and messages of runs and comparisons, of bad input, and of Ctrl-C."""

import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastsam.lab import cli, examples
from tests.helpers.places import ROOT

CONFIG = """
clients = 6
model = "mlp"
model_options = {hidden = [8]}
rounds = 3
batch_size = 32
executor = "sequential"
participation = 0.5
target = 0.1
[fedsam]
rho = 0.1
"""


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a new directory with a config file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(CONFIG)
    return tmp_path


def metrics(run_dir: Path) -> list[dict]:
    """Return the records of metrics.jsonl without the only field that may differ."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if not key.startswith("seconds")} for record in records]


def test_run_writes_the_run_directory_and_says_where(cwd: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", "small.toml", "--algorithm", "fedsam", "--lr", "0.2"]) == 0
    out = capsys.readouterr().out
    run_dir = cwd / "runs" / "small-fedsam-001"
    assert "run directory: runs/small-fedsam-001" in out and "fedsam: round 3/3" in out and "to 10 %" in out
    expected = {
        "config.json", "metrics.jsonl", "summary.json", "model.safetensors", "environment.json", "curves.png",
    }  # fmt: skip
    assert expected <= {path.name for path in run_dir.iterdir()}
    assert [record["round"] for record in metrics(run_dir)] == [1, 2, 3]
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["lr"], config["algorithm"], config["fedsam"]["rho"], config["clients"]) == (0.2, "fedsam", 0.1, 6)


def test_the_stored_config_repeats_the_run_in_the_next_directory(cwd: Path) -> None:
    assert cli.main(["run", "small.toml", "--algorithm", "fedsam"]) == 0
    assert cli.main(["run", "runs/small-fedsam-001/config.json"]) == 0
    first, second = (cwd / "runs" / f"small-fedsam-00{i}" for i in (1, 2))
    assert metrics(first) == metrics(second)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert json.loads((first / "config.json").read_text()) == json.loads((second / "config.json").read_text())


def test_compare_runs_every_algorithm_and_seed(cwd: Path, capsys: pytest.CaptureFixture) -> None:
    command = [
        "compare", "small.toml", "--algorithms", "fedavg,mofedsam", "--seeds", "0,1", "--run-dir", "cmp", "--rounds",
        "2",
    ]  # fmt: skip
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert re.search(r"FedAvg +\d+\.\d\d ± \d+\.\d\d", out) and "run directory: cmp" in out
    names = {path.name for path in (cwd / "cmp").iterdir()}
    runs = {"fedavg-seed0", "fedavg-seed1", "mofedsam-seed0", "mofedsam-seed1"}
    pictures = {f"curves{suffix}" for suffix in (".png", ".svg", ".pdf")}
    assert names == runs | pictures | {"config.json", "report.html", "tables", "summary.json"}
    summary = json.loads((cwd / "cmp" / "summary.json").read_text())
    assert len(summary["runs"]) == 4 and set(summary["algorithms"]) == {"fedavg", "mofedsam"}
    assert "<td>MoFedSAM</td>" in (cwd / "cmp" / "report.html").read_text()
    for name in runs:
        assert len(metrics(cwd / "cmp" / name)) == 2


def test_a_terminal_breaks_sentences_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    shown = {}
    for is_terminal in (True, False):
        output = io.StringIO()
        console = Console(file=output, width=60, force_terminal=is_terminal, color_system=None, highlight=False)
        monkeypatch.setattr(cli, "_console", lambda c=console: c)
        words = ["compare", "small.toml", "--algorithms", "fedavg,fedsam", "--seeds", "0,1", "--rounds", "1"]
        assert cli.main(words) == 0
        shown[is_terminal] = output.getvalue()
    (sentence,) = re.findall(r"^FedSAM: .*$", shown[False], re.M)
    assert len(sentence) > 60 and sentence not in shown[True]
    lines = [line.strip() for line in shown[True].splitlines()]
    first = next(n for n, line in enumerate(lines) if line.startswith("FedSAM: "))
    assert " ".join(lines[first : first + 2]) == sentence


def test_compare_refuses_an_existing_directory_without_resume(cwd: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["compare", "small.toml", "--algorithms", "fedavg,fedsam", "--run-dir", "cmp"]
    assert cli.main(command) == 0
    run_files = {path: path.read_bytes() for path in (cwd / "cmp").rglob("*.jsonl")}
    capsys.readouterr()
    assert cli.main(command) == 1
    error = capsys.readouterr().err
    assert "cmp exists" in error and "--resume" in error and "Traceback" not in error
    more_algorithms = ["compare", "small.toml", "--algorithms", "fedavg,fedsam,mofedsam", "--run-dir", "cmp"]
    assert cli.main([*more_algorithms, "--resume"]) == 0
    assert {
        path: path.read_bytes() for path in run_files
    } == run_files  # finished runs are reused, the new algorithm is added
    out = capsys.readouterr().out
    assert "fedsam-seed0: all 3 rounds were done before" in out
    assert "fedsam-seed0: round" not in out.replace("mofedsam", "")
    assert len(metrics(cwd / "cmp" / "mofedsam-seed0")) == 3


def test_compare_goes_on_when_a_run_diverges(cwd: Path, capsys: pytest.CaptureFixture) -> None:
    names = ["compare", "small.toml", "--algorithms", "fedavg,fedsam,mofedsam", "--run-dir", "cmp"]
    assert cli.main([*names, "--fedsam.lr", "1e30"]) == 1
    output = capsys.readouterr()
    assert "error: fedsam-seed0: round 1: all" in output.err and "diverged" in output.err
    assert re.search(r"^ *FedAvg +\d", output.out, re.M) and re.search(r"^ *MoFedSAM +\d", output.out, re.M)
    assert "<li>failed: fedsam-seed0: round 1: all" in (cwd / "cmp" / "report.html").read_text()
    assert cli.main([*names[:3], "fedsam", "--lr", "1e30"]) == 1
    assert "no run of the comparison in runs/small-compare-001 was finished" in capsys.readouterr().err


def test_compare_leaves_foreign_directories_and_other_runs_alone(cwd: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["compare", "small.toml", "--algorithms", "fedavg", "--rounds", "1", "--run-dir"]
    (cwd / "empty").mkdir()
    assert cli.main([*command, "empty"]) == 0
    (cwd / "mine").mkdir()
    (cwd / "mine" / "thesis.txt").write_text("all of it")
    assert cli.main([*command, "mine", "--resume"]) == 1
    assert "mine is not the directory of a comparison" in capsys.readouterr().err
    old_files = {path: path.read_bytes() for path in (cwd / "empty").rglob("*") if path.is_file()}
    assert cli.main([*command, "empty", "--resume", "--lr", "0.05"]) == 1
    assert "cannot be resumed with another lr: it was started with 0.1, now it is 0.05" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (cwd / "empty").rglob("*") if path.is_file()} == old_files
    assert [path.name for path in (cwd / "mine").iterdir()] == ["thesis.txt"]


def test_resume_extends_a_finished_run(cwd: Path) -> None:
    assert cli.main(["run", "small.toml", "--run-dir", "longer"]) == 0
    assert cli.main(["run", "longer/config.json", "--run-dir", "longer", "--resume", "--rounds", "5"]) == 0
    assert cli.main(["run", "small.toml", "--run-dir", "whole", "--rounds", "5"]) == 0
    assert metrics(cwd / "longer") == metrics(cwd / "whole")
    assert (cwd / "longer" / "config.json").read_bytes() == (cwd / "whole" / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "CONFIG"),
        (["run", "small.toml", "extra"], "unrecognized arguments: extra"),
        (["info", "--rounds", "3"], "unrecognized arguments"),
        (["walk"], "invalid choice: 'walk'"),
        (["rnu"], "did you mean 'run'?"),
        (["sweep", "a.toml"], "compare CONFIG --sweep"),
        (["train", "a.toml"], "fastsam run CONFIG"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    """Unknown commands, and commands with too many arguments. `test_odd_input.py` has wrong values."""
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", "small.toml", "--clients", "9999", "--debug"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error and error.rstrip().endswith("take at most 1437 clients")


def test_an_error_in_a_users_code_names_its_type(cwd: Path, capsys: pytest.CaptureFixture) -> None:
    (cwd / "own.py").write_text("def make():\n    return {}['nothing']\n")
    (cwd / "own.toml").write_text("data = 'own.py:make'\n")
    assert cli.main(["run", "own.toml"]) == 1
    error = capsys.readouterr().err
    assert "error: KeyError: 'nothing'" in error and "--debug" in error


@pytest.mark.parametrize("command", [["run"], ["compare", "--algorithms", "fedavg"]])
def test_a_run_directory_that_cannot_be_made_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture, command: list[str]
) -> None:
    (tmp_path / "small.toml").write_text("rounds = 1\nmodel = 'mlp'")
    (tmp_path / "file").write_text("")
    name, *flags = command
    assert cli.main([name, str(tmp_path / "small.toml"), *flags, "--run-dir", str(tmp_path / "file" / "new")]) == 1
    assert "file/new cannot be made (Not a directory); choose another run directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run"], ["compare", "--algorithms", "scaffold"]])
def test_a_full_disk_leaves_a_run_that_goes_on_with_the_command_it_prints(
    cwd: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    from fastsam.fed.rundir import checkpoint

    name, *flags = command
    arguments = [name, "small.toml", *flags, "--run-dir", "full"]
    write = checkpoint.write_bytes

    def full(path: Path, data: bytes, **options: bool) -> None:
        if path.name == "server-000002.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data, **options)

    monkeypatch.setattr(checkpoint, "write_bytes", full)
    assert cli.main(arguments) == 1
    message = capsys.readouterr().err.strip().splitlines()
    path = "full" if name == "run" else "full/scaffold-seed0"
    assert message[-2].startswith(f"error: no space is left for {path} (No space left on device). Its last checkpoint")
    monkeypatch.undo()
    monkeypatch.chdir(cwd)
    assert cli.main(shlex.split(message[-1])[1:]) == 0
    assert [record["round"] for record in metrics(cwd / path)] == [1, 2, 3]


def test_numbered_directories(cwd: Path) -> None:
    assert cli.numbered_directory("a", resume=False) == Path("runs/a-001") == cli.numbered_directory("a", resume=True)
    for name in ("a-001", "a-007", "a-b-009", "a-x"):
        (cwd / "runs" / name).mkdir(parents=True)
    assert cli.numbered_directory("a", resume=False) == Path("runs/a-008")
    assert cli.numbered_directory("a", resume=True) == Path("runs/a-007")


def interrupt(arguments: list[str], run_dir: Path, rounds: int) -> subprocess.CompletedProcess:
    """Start the command, send SIGINT when `rounds` rounds are done, and wait for its end."""
    command, pipe = [sys.executable, "-m", "fastsam", *arguments], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    file, limit = run_dir / "metrics.jsonl", time.monotonic() + 120
    while not file.exists() or len(file.read_text().splitlines()) < rounds:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "the run did not get on"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_ctrl_c_leaves_a_state_from_which_resume_ends_in_the_same_bits(cwd: Path) -> None:
    arguments = ["run", "small.toml", "--algorithm", "mofedsam", "--rounds", "40"]
    process = interrupt([*arguments, "--run-dir", "stopped"], cwd / "stopped", 3)
    assert process.returncode == 130
    assert "Traceback" not in process.stderr
    assert len(metrics(cwd / "stopped")) < 40 and not (cwd / "stopped" / "summary.json").exists()
    command = shlex.split(process.stderr.strip().splitlines()[-1])
    assert command == ["fastsam", "run", "stopped/config.json", "--run-dir", "stopped", "--resume"]
    assert cli.main(command[1:]) == 0
    assert cli.main([*arguments, "--run-dir", "whole"]) == 0
    assert metrics(cwd / "stopped") == metrics(cwd / "whole")
    assert (cwd / "stopped" / "model.safetensors").read_bytes() == (cwd / "whole" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_ctrl_c_in_a_comparison_resumes_with_the_command_it_prints(cwd: Path) -> None:
    arguments = ["compare", "small.toml", "--algorithms", "fedavg,fedsam", "--rounds", "40"]
    process = interrupt([*arguments, "--run-dir", "cmp"], cwd / "cmp" / "fedsam-seed0", 2)
    assert process.returncode == 130
    command = shlex.split(process.stderr.strip().splitlines()[-1])
    assert command == ["fastsam", "compare", "cmp/config.json", "--run-dir", "cmp", "--resume"]
    first = (cwd / "cmp" / "fedavg-seed0" / "metrics.jsonl").read_bytes()
    assert cli.main(command[1:]) == 0
    assert (cwd / "cmp" / "fedavg-seed0" / "metrics.jsonl").read_bytes() == first
    assert [len(metrics(cwd / "cmp" / f"{name}-seed0")) for name in ("fedavg", "fedsam")] == [40, 40]
    assert (cwd / "cmp" / "report.html").exists()


def test_the_demo_is_the_comparison_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--print-config", "--seeds", "4"]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert cli.main(["compare", str(ROOT / "examples" / "showcase.toml"), "--print-config", "--seeds", "4"]) == 0
    assert actual == json.loads(capsys.readouterr().out)
    assert actual["compare"]["seeds"] == [4] and len(actual["compare"]["algorithms"]) == 5


def test_the_demo_writes_examples_that_can_be_edited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my configs"
    assert cli.main(["demo", "--copy", str(folder)]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert {Path(words[2]) for words in commands} == {folder / name for name in examples.CONFIGS}
    for name in examples.CONFIGS:
        assert (folder / name).read_text() == (ROOT / "examples" / name).read_text()
        assert cli.main(["run", str(folder / name), "--print-config"]) == 0
    (folder / "digits.toml").write_text("mine")
    assert cli.main(["demo", "--copy", str(folder)]) == 1
    assert "Choose another folder" in capsys.readouterr().err
    assert (folder / "digits.toml").read_text() == "mine"


def test_the_wheel_has_the_examples_that_the_demo_reads() -> None:
    setup = (ROOT / "setup.py").read_text()
    (names,) = re.findall(r"^CONFIGS = \((.*)\)", setup, re.M)
    assert names == ", ".join(f'"{name}"' for name in examples.CONFIGS)


@pytest.mark.parametrize("command", ["bench", "demo", "run", "compare", "reproduce", "plots"])
def test_the_help_of_a_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out.partition("examples:\n")[2]
    lines = [line.strip() for line in text.splitlines()]
    assert lines and all(line.startswith(f"fastsam {command}") for line in lines)
    for line in lines:  # each can be parsed
        cli.parser().parse_known_args(shlex.split(line)[1:])
