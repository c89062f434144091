"""Sweeps: the runs that a comparison makes of them, and the files that it writes."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastsam.lab import cli, compare, config
from fastsam.lab.config import ConfigError
from fastsam.lab.sweep import Axis, parse_axis

FILE = """
clients = 6
model = "mlp"
model_options = {hidden = [8]}
rounds = 2
batch_size = 32
executor = "sequential"
participation = 0.5
target = 0.1
[fedsam]
rho = 0.3
"""


def read_config(tmp_path: Path, text: str = FILE, *flags: str) -> config.ConfigSource:
    (tmp_path / "small.toml").write_text(text)
    return config.read(tmp_path / "small.toml", flags)


def labels(plan: compare.Plan) -> list[str]:
    return list(dict.fromkeys(run.label for run in plan.runs))


def test_an_option_is_swept_for_the_algorithms_that_take_it(tmp_path: Path) -> None:
    plan = compare.plan(read_config(tmp_path), ["fedavg", "fedsam", "mofedsam"], ["0", "1"], ["rho=0.01,0.1"])
    assert labels(plan) == ["fedavg", "fedsam rho=0.01", "fedsam rho=0.1", "mofedsam rho=0.01", "mofedsam rho=0.1"]
    assert [c.seed for c in plan.configs] == [0, 1] * 5
    assert [c.options.get("rho") for c in plan.configs[::2]] == [None, 0.01, 0.1, 0.01, 0.1]  # over the file's 0.3
    assert plan.runs[2].directory == "fedsam-rho=0.01-seed0" and plan.runs[2].point == (("rho", 0.01),)
    assert len({run.directory for run in plan.runs}) == len(plan.runs)


def test_sweeps_are_combined_and_a_table_names_one_algorithm(tmp_path: Path) -> None:
    plan = compare.plan(read_config(tmp_path), ["fedavg", "fedsmoo"], None, ["lr=0.1,0.2", "fedsmoo.dyn=true,false"])
    assert labels(plan) == [
        "fedavg lr=0.1", "fedavg lr=0.2", "fedsmoo lr=0.1 dyn=true", "fedsmoo lr=0.1 dyn=false",
            "fedsmoo lr=0.2 dyn=true",
        "fedsmoo lr=0.2 dyn=false",
    ]  # fmt: skip
    assert [(c.lr, c.options.get("dyn")) for c in plan.configs[2:]] == [(0.1, True), (0.1, False), (0.2, True),
        (0.2, False)]  # fmt: skip


def test_the_name_of_a_key_of_the_run_means_that_key_outside_a_table(tmp_path: Path) -> None:
    """`alpha` outside of a table is the Dirichlet split's, although FedCM has an option of this name."""
    plan = compare.plan(read_config(tmp_path), ["fedcm"], None, ["alpha=0.5,1"])
    assert [(c.alpha, c.options["alpha"]) for c in plan.configs] == [(0.5, 0.1), (1.0, 0.1)]
    assert len({compare.data_key(c) for c in plan.configs}) == 2
    plan = compare.plan(read_config(tmp_path), ["fedcm"], None, ["fedcm.alpha=0.5,1"])
    assert [(c.alpha, c.options["alpha"]) for c in plan.configs] == [(0.3, 0.5), (0.3, 1.0)]
    assert [run.point for run in plan.runs] == [(("alpha", 0.5),), (("alpha", 1.0),)]


def test_the_stored_record_gives_the_same_plan(tmp_path: Path) -> None:
    sweep = ["rho=0.01,linear(0.1, 0.01, 50)", "participation=0.5,1"]
    plan = compare.plan(read_config(tmp_path), ["fedavg", "fedsam"], ["3", "4"], sweep)
    assert plan.sweep[0].values == ("0.01", "linear(0.1, 0.01, 50)")
    (tmp_path / "config.json").write_text(json.dumps(plan.record()))
    assert compare.plan(config.read(tmp_path / "config.json")) == plan


@given(
    st.sampled_from(["rho", "fedsam.rho", "local_epochs"]),
    st.lists(st.sampled_from(["1", "0.5", "true", "sqrt(2)", "min(1, round)"]), min_size=1, max_size=4, unique=True),
)
def test_the_text_of_an_axis_is_read_again(name: str, values: list[str]) -> None:
    axis = parse_axis(f"{name}={','.join(values)}")
    assert axis.values == tuple(values) and axis.name == name and parse_axis(axis.text) == axis
    assert parse_axis("local-epochs = 1, 5,") == Axis(None, "local_epochs", ("1", "5"))


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (["rho"], "a sweep is written key=value,value,..., e.g. rho=0.01,0.05,0.1; got 'rho'"),
        (["rho="], "a sweep is written"),
        (["rho=0.1,0.1"], "names a value twice"),
        (["lr=0.1,0.10"], "names a value twice: both runs are 'fedavg-lr=0.1-seed0'"),
        (["fedsam.rho=0.1,1e-1"], "names a value twice: both runs are 'fedsam-rho=0.1-seed0'"),
        (["lr=0.10000001,0.1"], "names a value twice: both runs are 'fedavg-lr=0.1-seed0'"),
        (["rho=0.1", "rho=0.2"], "the swept key 'rho' is named twice"),
        (["beta=0.1,0.2"], "--sweep beta: none of fedavg, fedsam takes this key; it is an option of "),
        (["fedcm.alpha=0.1"], "--sweep fedcm.alpha: none of fedavg, fedsam takes this key; fedcm is not compared\n"),
        (["rhoo=0.1"], "--sweep rhoo: none of fedavg, fedsam takes this key (did you mean 'rho'?)"),
        (
            ["local_epoch=1"],
            "--sweep local_epoch: none of fedavg, fedsam takes this key (did you mean 'local_epochs'?)",
        ),
        (["fedsam.roh=1"], "--sweep fedsam.roh: none of fedavg, fedsam takes this key (did you mean 'rho'?)"),
        (["fedsma.rho=1"], "--sweep fedsma.rho: none of fedavg, fedsam takes this key (did you mean 'fedsam'?)"),
        (["seed=1,2"], "seed cannot be swept: use --seeds"),
        (["algorithm=fedavg,fedsam"], "algorithm cannot be swept: use --algorithms"),
        (["measures=sharpness"], "measures cannot be swept"),
        (["rho=small,large"], "rho"),
        (["lr=-1,0.1"], "lr"),
        (["local_epochs=1.5"], "local_epochs must be int, got '1.5'"),
    ],
)
def test_bad_sweeps(tmp_path: Path, sweep: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    read_config(tmp_path)
    flags = [part for text in sweep for part in ("--sweep", text)]
    run_dir = tmp_path / "cmp"
    assert cli.main(["compare", str(tmp_path / "small.toml"), "--algorithms", "fedavg,fedsam", *flags, "--run-dir",
        str(run_dir)]) == 1  # fmt: skip
    assert message in capsys.readouterr().err and not run_dir.exists()


def test_a_data_key_that_is_not_swept_must_still_agree(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one data set: clients is 6 for fedavg and 8 for fedsam"):
        compare.plan(read_config(tmp_path, FILE + "clients = 8\n"), ["fedavg", "fedsam"], None, ["alpha=0.5,1"])


@pytest.mark.parametrize("figures", ["named", pytest.param("drawn", marks=pytest.mark.slow)])  # conftest.py
def test_the_command_line_draws_it_all(
    figures: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    read_config(tmp_path)
    command = ["compare", "small.toml", "--algorithms", "fedavg,fedsam", "--sweep", "rho=0.01,0.1", "--sweep",
        "clients=5,6",
               "--measures", "sharpness,consistency", "--surface", "3", "--run-dir", "cmp"]  # fmt: skip
    assert cli.main(command) == 0
    names = {path.name for path in (tmp_path / "cmp").iterdir()}
    expected = {"curves", "curve-sharpness", "curve-consistency", "surfaces", "sweep-rho", "sweep-clients"}
    assert {f"{name}{kind}" for name in expected for kind in (".png", ".svg", ".pdf")} <= names
    assert "fedsam-rho=0.01-clients=6-seed0" in names
    page = (tmp_path / "cmp" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(expected)
    assert "<li>clients, clients = 5: " in page and "<li>clients, clients = 6: " in page
    assert "<td>FedSAM rho=0.1 clients=5</td>" in page and "<li>swept clients: 5, 6</li>" in page
    sizes = {
        name: json.loads((tmp_path / "cmp" / name / "config.json").read_text())["clients"]
        for name in names
        if name.endswith("-seed0")
    }
    assert {name: size for name, size in sizes.items() if f"clients={size}" in name} == sizes and len(sizes) == 6
    out = capsys.readouterr().out
    assert "FedSAM rho=0.01 clients=5" in out and all(f" cmp/{name}.png\n" in out for name in expected)
    resume_command = ["compare", "cmp/config.json", "--run-dir", "cmp", "--resume"]
    assert cli.main(resume_command) == 0 and "all 2 rounds were done before" in capsys.readouterr().out


def test_bare_surface_does_not_swallow_a_flag(tmp_path: Path) -> None:
    arguments, flags = cli.parser().parse_known_args(["compare", "small.toml", "--surface", "--rounds", "2"])
    assert arguments.surface == 51 and flags == ["--rounds", "2"]
