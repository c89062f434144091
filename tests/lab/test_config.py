"""The config of a run: layers, types, unknown keys, another algorithm's options, the record that gives the same run
again."""

import inspect
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from fastsam import fed
from fastsam.fed.common.option import check, option, table
from fastsam.fed.loop.options import Settings
from fastsam.lab import compare, config, experiment, run_config
from fastsam.lab.config import ConfigError
from tests.helpers.places import ROOT
from tools import generated

FILE = """
rounds = 7
lr = 0.2
[fedsam]
rho = 0.3
[mofedsam]
beta = 0.4
lr = 0.5
"""


def read_config(tmp_path: Path, text: str = FILE, *flags: str) -> config.ConfigSource:
    path = tmp_path / "exp.toml"
    path.write_text(text)
    return config.read(path, flags)


def resolve(tmp_path: Path, text: str, *flags: str, algorithm: str | None = None) -> run_config.RunConfig:
    return config.resolve(read_config(tmp_path, text, *flags), algorithm)


def test_the_signature_of_run_is_the_table() -> None:
    keywords = {name: p for name, p in inspect.signature(fed.run).parameters.items() if p.kind is p.KEYWORD_ONLY}
    rows, hints, doc = table(Settings), get_type_hints(fed.run), inspect.getdoc(fed.run)
    assert keywords.keys() - rows.keys() == {"test", "collate", "run_dir", "resume", "callbacks", "progress", "config"}
    assert keywords["rounds"].default is inspect.Parameter.empty  # callers of `run` always give the number of rounds
    for name, row in rows.items():
        default = row.default if name == "rounds" else keywords[name].default
        assert (hints[name], type(default), default) == (row.kind, type(row.default), row.default), name
        assert f"\n    {name}: {row.help}"[:80] in doc, name


def test_every_key_has_its_help_and_a_good_default() -> None:
    assert len(run_config.KEYS) > len(table(Settings)) > 20
    for key, row in run_config.KEYS.items():
        assert row.help and row.check(row.default) in (row.default, []), key


@dataclass(frozen=True)
class Opts:
    size: int = option(3, "of it", at_least=1)
    share: float | None = option(None, "of all; none: no limit", greater_than=0, at_most=1)
    kind: str = option("round", "of what", choices=("round", "square"))
    exact: bool = option(True, "or about")
    parts: dict[str, int] = option({}, "by name", resumable=True)
    plain: int = 5

    def __post_init__(self) -> None:
        check(self)


def test_a_row_is_all_that_an_option_needs() -> None:
    assert list(table(Opts)) == ["size", "share", "kind", "exact", "parts"]
    assert [row.default_text for row in table(Opts).values()] == ["3", "none", "round", "true", "empty"]
    assert table(Opts)["kind"].meaning == "of what (round, square)" and table(Opts)["parts"].resumable
    opts = Opts(size=np.int64(4), share=np.float32(0.5))
    assert (type(opts.size), type(opts.share), opts.parts) == (int, float, {}) and Opts().parts is not opts.parts
    for values, words in [
        ({"size": 0}, "size must be an integer >= 1, got 0"),
        ({"share": 2}, r"share \(of all; none: no limit\) must be a finite number > 0 and <= 1, got 2"),
        ({"kind": "sqare"}, r"kind must be one of 'round', 'square', got 'sqare' \(did you mean 'square'\?\)"),
        ({"exact": 1}, "exact must be one of True, False, got 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            Opts(**values)


def test_layers_the_later_wins(tmp_path: Path) -> None:
    plain = resolve(tmp_path, FILE, algorithm="fedavg")
    assert (plain.rounds, plain.lr, plain.batch_size, plain.options, plain.name) == (7, 0.2, 16, {}, "exp")
    sam = resolve(tmp_path, FILE, algorithm="fedsam")
    assert sam.options == {"rho": 0.3, "adaptive": False, "eta": 0.0} and sam.lr == 0.2
    momentum = resolve(tmp_path, FILE, algorithm="mofedsam")
    assert (momentum.lr, momentum.options["beta"]) == (0.5, 0.4)
    flag_cfg = resolve(tmp_path, FILE, "--lr", "0.9", "--beta=0.7", algorithm="mofedsam")
    assert (flag_cfg.lr, flag_cfg.options["beta"]) == (0.9, 0.7)
    flags = ["--lr", "0.9", "--mofedsam.lr", "0.8", "--mofedsam.beta", "0.6"]
    table = resolve(tmp_path, FILE, *flags, algorithm="mofedsam")
    assert (table.lr, table.options["beta"]) == (0.8, 0.6)


def test_flags_take_dashes_and_underscores_and_every_type(tmp_path: Path) -> None:
    flags = [
        "--local-epochs", "3", "--batch_size=4", "--clip-norm", "10", "--shuffle", "false", "--model-options",
        '{"hidden": 8}',
    ]  # fmt: skip
    cfg = resolve(tmp_path, FILE, *flags, "--target", "none", "--balanced", "--split", "iid", "--seed", "-1")
    assert (cfg.local_epochs, cfg.batch_size, cfg.clip_norm, cfg.shuffle, cfg.model_options) == (
        3, 4, 10.0, False, {"hidden": 8},
    )  # fmt: skip
    assert cfg.target is None and cfg.balanced is True and cfg.seed == -1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("roundz = 3", r"unknown key 'roundz' \(did you mean 'rounds'\?\)"),
        ("rhoo = 3", r"unknown key 'rhoo' \(did you mean 'rho'\?\)"),
        ("zzzzzz = 3", r"unknown key 'zzzzzz'; `fastsam run --help` lists all keys"),
        ("options = 3", "unknown key 'options'"),
        ("rounds = '5'", r"rounds must be int, got '5' \(str\)"),
        ("rounds = 5.5", "rounds must be int, got 5.5"),
        ("rounds = true", "rounds must be int, got True"),
        ("lr = 'fast'", "lr = 'fast': 'fast' is not known; names are round"),
        ("shuffle = 1", "shuffle must be bool, got 1"),
        ("clip_norm = 'big'", "clip_norm must be float or none, got 'big'"),
        ("model_options = 3", "model_options must be dict, got 3"),
        (
            "split = 'dirichelt'",
            r"split must be one of 'dirichlet', 'iid', .*'own', got 'dirichelt' \(did you mean 'dirichlet'\?\)",
        ),
        ("algorithm = 3", "algorithm must be a string"),
        ("algorithm = 'fedsamm'", r"unknown algorithm 'fedsamm' \(did you mean 'fedsam'\?\)"),
        (
            "algorithm = 'fedsam'\nbeta = 0.1",
            r"beta is an option of .*mofedsam.*, not of fedsam \(its options are rho, adaptive, eta\)",
        ),
        (
            "algorithm = 'fedavg'\nrho = 0.1",
            r"rho is an option of .*, fedsam, .*, not of fedavg \(it has no options\); .*the table of one of these",
        ),
        ("algorithm = 'fedsam'\nrho = 'a'", "rho = 'a': 'a' is not known; names are round"),
        ("algorithm = 'fedsam'\nrho = -1.0", "rho"),
        ("algorithm = 'fedsam'\nrho = nan", "^fedsam: rho"),
        ("[fedsamm]\nrho = 0.1", r"unknown table \[fedsamm\] \(did you mean 'fedsam'\?\)"),
        ("[fedsam]\nrhoo = 0.1", r"in \[fedsam\]: unknown key 'rhoo' \(did you mean 'rho'\?\)"),
        ("[fedsam]\nalgorithm = 'fedavg'", r"in \[fedsam\]: unknown key 'algorithm'"),
        ("[compare]\nseed = [1]", r"\[compare\] holds the lists"),
        ("split = 'iid'\nalpha = 0.3", "alpha has no meaning here: the split 'iid' does not take it"),
        ("balanced = true", "balanced has no meaning here: the split 'dirichlet'"),
        (
            "data = 'own.py:make'\nclients = 3",
            "clients has no meaning here: data is 'own.py:make', the function makes the clients",
        ),
        ("data = 'c/*.npz'\nsplit = 'iid'", "split has no meaning here: data is .* each file is a client"),
        ("data_options = {a = 1}", "data_options has no meaning here"),
        ("classes = 10", "classes has no meaning here"),
        ("rounds = ", "cannot be read as TOML"),
    ],
)
def test_bad_files_name_the_key_and_what_would_work(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(tmp_path, text)


def test_a_table_of_options_is_also_flags(tmp_path):
    cfg = resolve(
        tmp_path, FILE + "\n[privacy]\nclip = 0.5\n", "--privacy.noise-multiplier", "2", "--privacy.noise=local"
    )
    assert cfg.privacy == {"clip": 0.5, "noise_multiplier": 2.0, "noise": "local"}
    with pytest.raises(ConfigError, match=r"in \[privacy\]: unknown key 'clipp' .did you mean 'clip'"):
        resolve(tmp_path, FILE, "--privacy.clipp", "0.5")


def test_flags_that_may_be_a_word_or_a_list(tmp_path: Path) -> None:
    for value, expected in (("samples", "samples"), ("a.py:f", "a.py:f"), ("[1, 2]", [1, 2]), ("[3]", [3])):
        assert resolve(tmp_path, FILE, "--weighting", value).weighting == expected
    assert resolve(tmp_path, FILE, "--lr", "cosine(0.1, 0.01, 5)").lr == "cosine(0.1, 0.01, 5)"
    assert resolve(tmp_path, FILE, "--local-parameters", "out").local_parameters == "out"
    assert resolve(tmp_path, FILE, "--local-parameters", "out,hidden").local_parameters == ["out", "hidden"]


def test_bad_flags(tmp_path: Path) -> None:
    for flags, message in [
        (["--rounds", "many"], "rounds must be int, got 'many'"),
        (["--shuffle", "maybe"], "shuffle must be bool, got 'maybe'"),
        (["--round", "3"], "did you mean 'rounds'"),
        (["--beta", "0.1"], "not of fedavg"),
        (["--fedsam.roh", "0.1"], r"in \[fedsam\]: unknown key 'roh'"),
        (["--lr", "0.1", "0.2"], "expected --key value, got '0.2'"),
        (["--lr-decay"], "lr_decay must be float, got 'true' .*a flag without a value means true"),
    ]:
        with pytest.raises(ConfigError, match=message):
            resolve(tmp_path, FILE, *flags)


def test_missing_file_directory_and_foreign_json(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no config file"):
        config.read(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a directory; a run directory's config is"):
        config.read(tmp_path)
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ConfigError, match="keys and values, got list"):
        config.read(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"rounds": 3')
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        config.read(tmp_path / "a.json")


@pytest.mark.parametrize("algorithm", ["fedavg", "fedsam", "mofedsam"])
@pytest.mark.parametrize(
    "flags", [[], ["--split", "iid", "--balanced"], ["--clip-norm", "3", "--model-options", '{"hidden": 9}']]
)
def test_the_record_gives_the_same_config(tmp_path: Path, algorithm: str, flags: list[str]) -> None:
    cfg = resolve(tmp_path, FILE, *flags, algorithm=algorithm)
    (tmp_path / "config.json").write_text(json.dumps(cfg.record()))
    assert config.resolve(config.read(tmp_path / "config.json")) == cfg


def test_every_key_of_the_record_that_has_a_meaning_is_there(tmp_path: Path) -> None:
    record = resolve(tmp_path, FILE, algorithm="fedsam").record()
    foreign = {"balanced", "classes_per_client", "min_samples", "indices", "duplicates"}  # options of other splits
    foreign |= {"classes", "data_options", "data_dir", "download", "test_data", "held_out", "clients_per_domain"}
    assert set(run_config.KEYS) - set(record) == foreign
    assert record["fedsam"] == {"rho": 0.3, "adaptive": False, "eta": 0.0}


OWN = """
from dataclasses import dataclass
from fastsam import fed
@dataclass(frozen=True)
class MySAM(fed.FedSAM):
    alpha: float = 2.0
"""


def test_a_users_algorithm_and_an_option_with_the_name_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path / 'own.py'}:MySAM"
    cfg = resolve(tmp_path, f"algorithm = '{name}'\nrho = 0.25\nalpha = 0.6\n[mysam]\nalpha = 5.0")
    assert cfg.options == {"rho": 0.25, "adaptive": False, "eta": 0.0, "alpha": 5.0}
    assert cfg.alpha == 0.6  # outside the table it is the split's
    (tmp_path / "config.json").write_text(json.dumps(cfg.record()))
    assert config.resolve(config.read(tmp_path / "config.json")) == cfg


def test_a_comparison_is_planned_before_it_runs(tmp_path: Path) -> None:
    plan = compare.plan(read_config(tmp_path), ["fedavg", "mofedsam"], ["0", "3"])
    assert [(c.algorithm, c.seed, c.lr) for c in plan.configs] == [
        ("fedavg", 0, 0.2), ("fedavg", 3, 0.2), ("mofedsam", 0, 0.5), ("mofedsam", 3, 0.5),
    ]  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(plan.record()))
    assert compare.plan(config.read(tmp_path / "config.json")) == plan


def test_all_algorithms_are_compared_by_one_word(tmp_path: Path) -> None:
    names = list(fed.algorithms.registry)
    from_file = compare.plan(read_config(tmp_path, '[compare]\nalgorithms = ["all"]'))
    for plan in (compare.plan(read_config(tmp_path), ["all"]), from_file):
        assert [c.algorithm for c in plan.configs] == names == list(plan.algorithms)
        assert plan.record()["compare"]["algorithms"] == names


def test_a_flat_option_goes_to_the_compared_algorithms_that_take_it(tmp_path: Path) -> None:
    plan = compare.plan(read_config(tmp_path, FILE, "--rho", "0.9"), ["fedavg", "fedsam", "mofedsam"])
    assert [c.options.get("rho") for c in plan.configs] == [None, 0.9, 0.9]
    with pytest.raises(ConfigError, match="beta is an option of .*mofedsam"):
        compare.plan(read_config(tmp_path, FILE, "--beta", "0.9"), ["fedavg", "fedsam"])


@pytest.mark.parametrize(
    ("algorithms", "seeds", "text", "message"),
    [
        (None, None, FILE, "what shall be compared"),
        (["fedavg", "fedavg"], None, FILE, "the algorithm 'fedavg' is named twice"),
        (["fedavg"], ["1", "1"], FILE, "the seed '1' is named twice"),
        (["fedavg"], ["one"], FILE, "seeds must be integers such as 0,1,2, got 'one'"),
        (["fedavg", "fedsamm"], None, FILE, "unknown algorithm 'fedsamm'"),
        (["fedavg", "fedsam"], None, "[fedsam]\nrho = -1.0", "rho"),
        (
            ["fedavg", "fedsam"],
            None,
            "[fedsam]\nalpha = 1.0",
            "one data set: alpha is 0.3 for fedavg and 1.0 for fedsam",
        ),
    ],
)
def test_bad_comparisons(tmp_path: Path, algorithms: list | None, seeds: list | None, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare.plan(read_config(tmp_path, text), algorithms, seeds)


def test_unknown_data_and_loss(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data must be 'digits', a .npz file, .* got 'mnist'"):
        experiment.load_data(resolve(tmp_path, "data = 'mnist'"))
    with pytest.raises(ConfigError, match="needs test_data"):
        experiment.load_data(resolve(tmp_path, "data = 'c/*.npz'"))
    with pytest.raises(ValueError, match="loss must be the name of a function of torch.nn.functional"):
        experiment.keywords(resolve(tmp_path, "loss = 'cross_entropie'"))


def test_a_users_loss_and_sampler(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("def everybody(round, generator): return range(3)\ndef loss(a, b): return 1")
    text = f"sampler = '{tmp_path}/parts.py:everybody'\nloss = '{tmp_path}/parts.py:loss'"
    arguments = experiment.keywords(resolve(tmp_path, text))
    assert list(arguments["sampler"](0, None)) == [0, 1, 2] and arguments["loss"](0, 0) == 1


def test_the_rate_of_an_imported_optimizer_is_the_rate_of_the_run(tmp_path: Path) -> None:
    """config.json has the rate, and read again it gives the same run."""
    (tmp_path / "adamw.py").write_text(
        "from functools import partial\nimport torch\n"
        "def adamw(params, lr): return torch.optim.AdamW(params, lr=lr)\nmake = partial(adamw, lr=0.002)\n"
    )
    text = FILE.replace("lr = 0.2\n", "") + f"\n[fedavg]\noptimizer = '{tmp_path / 'adamw.py'}:make'\n"
    cfg = resolve(tmp_path, text, algorithm="fedavg")
    assert cfg.lr is None and experiment.keywords(cfg)["lr"] == 0.002
    run = experiment.build(replace(cfg, rounds=1))
    experiment.start(run, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["lr"] == 0.002 and json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["lr"] == 0.002
    assert experiment.keywords(replace(cfg, lr=record["lr"]))["lr"] == 0.002
    again = compare.plan(read_config(tmp_path, text, "--rounds", "1"), ["fedavg"])
    experiment.start(experiment.build(again.configs[0]), tmp_path / "cmp" / again.runs[0].directory)
    compare.write_record(again, tmp_path / "cmp")
    compare.check_directory(again, tmp_path / "cmp", resume=True)
    with pytest.raises(ValueError, match="lr=0.2 needs an optimizer without a rate"):
        experiment.keywords(replace(cfg, lr=0.2))
    assert resolve(tmp_path, FILE.replace("lr = 0.2\n", "optimizer = 'AdamW'\n")).lr == 0.001


def test_dtype_reaches_the_model(tmp_path: Path) -> None:
    trial = experiment.build(resolve(tmp_path, "dtype = 'float64'\nmodel = 'mlp'"))
    assert {str(p.dtype) for p in trial.model.parameters()} == {"torch.float64"}


DOCS = ROOT / "docs" / "federated.md"


def test_the_page_of_keys_is_that_of_the_table() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert generated.page(text) == text, "docs/cli.md is old; write it again: python -m tools.generated"
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, re.M)
    assert rows == [(key, row.default_text) for key, row in run_config.KEYS.items()]


def test_the_config_of_the_documentation_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.S)
    plan = compare.plan(read_config(tmp_path, block), ["fedavg", "fedsam", "mofedsam"])
    assert plan.configs[2].lr != plan.configs[1].lr == plan.configs[0].lr
