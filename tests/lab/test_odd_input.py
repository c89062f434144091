"""Odd words and numbers on the command line: each a line that says what was expected, before anything is written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pytest import CaptureFixture, MonkeyPatch

from fastsam.fed import data
from fastsam.lab import cli
from fastsam.lab.config import ConfigError, read, resolve

CONFIG = """
clients = 4
alpha = 0.3
model = "mlp"
model_options = {hidden = [4]}
rounds = 1
participation = 1.0
executor = "sequential"
"""
HUGE = str(10**20)
OWN_SPLIT = "\n".join(line for line in CONFIG.splitlines() if not line.startswith(("clients", "alpha")))


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("run small.toml --batch-size " + HUGE, f"batch_size must be an integer >= 1 that fits 64 bits, got {HUGE}"),
        ("run small.toml --seed " + HUGE, f"seed must be an integer that fits 64 bits, got {HUGE}"),
        ("run small.toml --seed -" + HUGE, f"seed must be an integer that fits 64 bits, got -{HUGE}"),
        ("run small.toml --slots " + HUGE, "slots .* that fits 64 bits"),
        ("run small.toml --split-seed -1", "the split's seed must be an integer in 0..4294967295, got -1"),
        ("run small.toml --split-seed 4294967296", "the split's seed must be .* got 4294967296"),
        ("run small.toml --split dirichlet_per_class --split-seed -1", "the split's seed must be"),
        ("run small.toml --alpha 1e308", r"alpha=1e\+308 is too large.*split='iid'"),
        ("run small.toml --alpha 1e-308", "alpha=1e-308 is too small"),
        ("run small.toml --algorithm FedLESAM_D", "unknown algorithm 'FedLESAM_D' .did you mean 'fedlesam-d'"),
        ("run small.toml --algorithm FedSAM", "did you mean 'fedsam'"),
        ("run small.toml --learning-rate 0.1", "unknown key 'learning_rate' .did you mean 'lr'"),
        ("run small.toml --clients_per_round 5", "unknown key 'clients_per_round' .did you mean 'cohort'"),
        ("run small.toml --algorithm=", "unknown algorithm ''"),
        ("run small.toml --name a/b", "name is a part of a directory's name.*without '/', got 'a/b'"),
        ("run small.toml --name ../../b", "without '/'"),
        ("run small.toml --name " + 121 * "x", "at most 120 bytes"),
        ("compare small.toml --algorithms fedavg --seeds=", "seeds must be integers such as 0,1,2, got none"),
        ("compare small.toml --algorithms fedavg --seeds " + HUGE, "seed must be an integer that fits 64 bits"),
        (
            "compare small.toml --algorithms fedavg --surface 99999999",
            "--surface needs 2 points or more, 1001 at most, got 99999999",
        ),
        ("compare small.toml --algorithms fedavg --surface 1", "--surface needs 2 points or more, .* got 1"),
        ("run none.toml", "`fastsam demo --copy DIR` writes examples"),
        ("run --lerning-rate 3 small.toml", "unknown key 'lerning_rate'"),
        ("run none.toml --lerning-rate 3", "unknown key 'lerning_rate'"),
        (
            "run small.toml --model resnet",
            "'mlp', 'emnist_cnn', 'lenet', 'resnet18_gn', 'vit_b_32' or a function that makes one",
        ),
        ("reproduce fedlesam-tabel2", "no table 'fedlesam-tabel2' .did you mean 'fedlesam-table2'"),
        ("reproduce fedlesam-table2 --scale --seeds one", "seeds must be integers such as 0,1,2, got 'one'"),
        ("reproduce fedlesam-table2 --scale --seeds=", "--seeds takes integers such as 0,1,2, got ''"),
    ],
    ids=lambda text: text[:60],
)
def test_is_told_in_one_line(cwd: Path, capsys: CaptureFixture, words: str, error: str) -> None:
    assert cli.main(words.split(" ")) == 1
    output = capsys.readouterr().err.strip()
    assert re.search(f"^error: .*{error}", output) and "\n" not in output
    assert sorted(path.name for path in cwd.iterdir()) == ["small.toml"]


def test_a_seed_may_be_negative_and_fill_its_bits() -> None:
    for seed in (-1, -(2**63), 2**63 - 1):
        assert cli.main(["run", "small.toml", "--seed", str(seed), "--run-dir", f"run{seed}"]) == 0


def test_names_in_letters_of_any_language(cwd: Path) -> None:
    (cwd / "größe.toml").write_text(CONFIG)
    assert cli.main(["run", "größe.toml"]) == 0
    assert json.loads((cwd / "runs" / "größe-fedavg-001" / "config.json").read_text())["name"] == "größe"


def test_a_flag_sets_aside_what_the_file_says_for_another_split(cwd: Path) -> None:
    config = resolve(read("small.toml", ["--split", "pathological", "--classes-per-client", "2"]))
    assert config.split == "pathological" and "alpha" not in config.record()
    (cwd / "config.json").write_text(json.dumps(config.record()))
    assert resolve(read("config.json")) == config
    own_config = resolve(read("small.toml", ["--split", "own", "--indices", "mine.json"]))
    assert not {"clients", "alpha"} & own_config.record().keys()


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("split = 'iid'\nalpha = 0.3", []),
        ("split = 'iid'\nalpha = 0.3", ["--split", "pathological"]),
        ("alpha = 0.3", ["--split", "iid", "--alpha", "0.6"]),
        ("alpha = 0.3", ["--split", "iid", "--alpha", "0.3"]),
        ("", ["--split", "iid", "--alpha", "0.6"]),
    ],
)
def test_a_key_without_meaning_is_still_an_error_where_it_was_meant(cwd: Path, text: str, flags: list[str]) -> None:
    (cwd / "other.toml").write_text(text)
    with pytest.raises(ConfigError, match="alpha has no meaning here"):
        resolve(read("other.toml", flags))


@pytest.mark.parametrize("split", ["iid", "dirichlet", "pathological", "dirichlet_per_class"])
def test_the_seed_of_a_split_is_what_numpy_takes(split: str) -> None:
    labels = np.arange(60) % 3
    options = {"alpha": 1.0} if "dirichlet" in split else {}
    for seed in (-1, 2**32, 1.5, "20", None):
        with pytest.raises(ValueError, match="the split's seed must be an integer.* got"):
            data.partition.make(split, labels, 2, seed, **options)
    assert len(data.partition.make(split, labels, 2, np.int64(2**32 - 1), **options)) == 2


def test_info_says_which_extras_are_there(capsys: CaptureFixture, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "installed_version", lambda package: None if package == "torchvision" else "1.2.3")
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name} +1\.2\.3$", out, re.M) for name in ("triton", "dp-accounting"))
    assert re.search(
        r"^torchvision +not installed \(.*vit_b_32: pip install --no-deps 'torchvision==0\.\d+\.\*' pillow\)$",
        out,
        re.M,
    )


def test_a_missing_package_is_one_message(capsys: CaptureFixture, monkeypatch: MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert cli.main(["run", "small.toml", "--data", "cifar10"]) == 1
    output = capsys.readouterr().err.strip()
    assert re.fullmatch(
        "error: the data set 'cifar10' needs torchvision, which is not installed.*: pip install --no-deps .*", output
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pipe.toml", "run pipe.toml"),
        ("pipe.json", "run pipe.json"),
        ("pipe.npz", "run small.toml --data pipe.npz --split iid --clients 4"),
        ("pipe.npz", "run small.toml --split own --indices pipe.npz"),
    ],
)
def test_a_named_pipe_is_refused(cwd: Path, capsys: CaptureFixture, name: str, words: str) -> None:
    os.mkfifo(cwd / name)
    (cwd / "small.toml").write_text(OWN_SPLIT)
    assert cli.main(words.split()) == 1
    assert re.search(f"is not a regular file.*{name}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "words", "error"),
    [
        ("deep.json", "run deep.json", "deep.json cannot be read as JSON: it is nested too deeply"),
        ("deep.toml", "run deep.toml", "deep.toml cannot be read as TOML: "),
        (
            "deep.json",
            "run small.toml --split own --indices deep.json",
            "deep.json is no JSON file .it is nested too deeply",
        ),
    ],
)
def test_too_deep_nesting_is_an_error(cwd: Path, capsys: CaptureFixture, name: str, words: str, error: str) -> None:
    (cwd / name).write_text(("a = " if name.endswith("toml") else "") + 100_000 * "[")
    (cwd / "small.toml").write_text(OWN_SPLIT)
    assert cli.main(words.split()) == 1
    output = capsys.readouterr().err
    assert re.search(error, output) and "Traceback" not in output


@pytest.mark.parametrize("words", ["info", "run --help"])
@pytest.mark.parametrize("buffer_settings", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def test_a_reader_that_goes_away_is_no_error_of_ours(words: str, buffer_settings: dict[str, str]) -> None:
    """Without buffering the first print fails, with buffering the flush at the end."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | buffer_settings
    command = f"{sys.executable} -m fastsam {words} | true"
    run = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, env=env)
    assert run.returncode == 0 and run.stderr == ""


def test_clients_of_a_config_without_samples_and_with_one(cwd: Path, capsys: CaptureFixture) -> None:
    """An empty one is named in one line, as a file and in a list; one sample, or fewer than a batch, is trained on."""
    rng = np.random.RandomState(0)
    for name, size in (("c0", 12), ("c1", 0), ("c2", 1), ("test", 9)):
        np.savez(cwd / f"{name}.npz", x=rng.randn(size, 6).astype("f4"), y=np.arange(size) % 3)
    text = CONFIG.replace("clients = 4\nalpha = 0.3", "")
    (cwd / "files.toml").write_text(f"test_data = 'test.npz'\nclasses = 3\n{text}")
    (cwd / "lists.toml").write_text(f"split = 'own'\nindices = 'own.json'\n{text}")
    (cwd / "own.json").write_text("[[0, 1], []]")
    for words, error in (
        (["files.toml", "--data", "c*.npz"], "c1.npz: labels: there are no samples"),
        (["lists.toml"], "indices of client 1 must be a list with one position or more, got []"),
    ):
        assert cli.main(["run", *words, "--run-dir", "run"]) == 1
        assert capsys.readouterr().err.strip() == f"error: {error}" and not (cwd / "run").exists()
    assert cli.main(["run", "files.toml", "--data", "c[02].npz", "--run-dir", "run"]) == 0
    record = json.loads((cwd / "run" / "metrics.jsonl").read_text())
    assert (record["clients"], record["samples"], record["steps"], record["excluded"]) == (2, 13, 2, [])


def test_a_refused_algorithm_does_not_stop_a_comparison(cwd: Path, capsys: CaptureFixture) -> None:
    words = "compare small.toml --algorithms feddyn,fedavg --server-lr 0.5 --run-dir both"
    assert cli.main(words.split()) == 1
    assert re.search(
        "error: feddyn-seed0: server_lr=0.5 needs .* the server's step of FedDyn has none", capsys.readouterr().err
    )
    assert (cwd / "both" / "fedavg-seed0" / "summary.json").exists()
    assert "the server&#x27;s step of FedDyn has none" in (cwd / "both" / "report.html").read_text()
