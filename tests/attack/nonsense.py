"""Random options, states, flags and config files: fastsam accepts them or refuses them with a message."""

import contextlib
import copy
import io
import os
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastsam import FusedSAM, fed
from fastsam.fed.common.option import table
from fastsam.fed.loop.options import Settings
from fastsam.lab import cli
from fastsam.lab.run_config import KEYS
from fastsam.optim import variants
from tests.attack.trials import Attack, Trial
from tests.helpers import oracle
from tests.helpers.interrupting import KERNELS, PACKAGE
from tests.helpers.nonsense import NONSENSE
from tests.helpers.sam_oracle import backward, copies, make_parameters, same_bits

TIMES = 20  # trials that share a process

# Plausible options of a run and values near them. An option with choices has all its choices in addition, except
# backends and executors, which may need a GPU. Options that compile or download are left out.
PLAUSIBLE: dict[str, list[Any]] = {
    "rounds": [1, 2], "local_epochs": [1, 2], "local_steps": [1, 3],
    "local_parameters": ["2", ["0.*", "2.bias"], "head"],
    "batch_size": [1, 3, 10**6],
    "lr": [0.1, 1e-300, 1e30, 0.0, "linear(0.1, 0, 2)", lambda t: 0.1 / t],
    "lr_decay": [0.5, 1e-200],
    "participation": [1.0, 0.5, 1e-9], "sampler": ["bernoulli", "fixed", "simulator", lambda t, g: [0], lambda t, g: [],
        lambda t, g: [99]],
    "available": [lambda t: [], lambda t: [0], lambda t: [99], lambda t: [True]],
    "weighting": ["uniform", "samples", [1], [1, 2, 3], lambda i: 1], "shuffle": [False],
    "momentum": [0.9, 5.0], "weight_decay": [0.1, 1e20], "clip_norm": [1e-30, 1.0, 1e30],
    "server_lr": [0.0, 0.5, 1e20], "seed": [-1, 2**63 - 1],
    "loss": ["cross_entropy", "nll_loss", "mse_loss", "relu"],
    "eval_every": [1, 7],
    "measures": [["sharpness"], ["drifts", "consistency"], ["x"]],
    "metrics": [{"x": len}, {}], "target": [0.5],
    "backend": ["native", "foreach", "reference"], "executor": ["sequential", "threads", "vmap"],
    "slots": [1, 3, 10**6],
    "max_excluded": [0.0, 0.5], "cohort": [1, 3],
    "optimizer": ["AdamW", partial(torch.optim.SGD, lr=0.1), partial(torch.optim.SGD, momentum=0.9)],
    "aggregation": ["median", "trimmed_mean:0.3", "krum"], "compression": [{"share": 0.1}, {"share": 1.0}, {}],
    "checkpoint_every": [1, 5],
    "privacy": [
        {"clip": 1e-9}, {"clip": 1.0, "noise_multiplier": 1e-3}, {"clip": 1.0, "noise_multiplier": 1e30},
        {"noise_multiplier": 1.0}, {"noise": "local"}, {"clip": -1.0}, {"nois": 1}, 0.5,
        {"clip": 1.0, "noise_multiplier": 1.0, "noise": "local", "delta": 1e-9}, {"delta": 0.5, "accountant": None},
    ],
}  # fmt: skip
SKIPPED_OPTIONS = ("device",)
Refusal = (TypeError, ValueError, RuntimeError)


@contextmanager
def expect_message() -> Iterator[None]:
    """Accept errors of the block only if fastsam or torch's optimizer class raised them with a message."""
    try:
        yield
    except AssertionError as error:
        if "torch/optim/" not in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        file = frames[-1].filename
        is_clear = file.startswith((PACKAGE, KERNELS)) and isinstance(error, Refusal) and str(error)
        assert is_clear or "torch/optim/" in file, f"{type(error).__name__} from {file}:{frames[-1].lineno}: {error}"


def draw_option(rng: random.Random, name: str) -> Any:
    plausible = PLAUSIBLE.get(name) or table(Settings)[name].choices
    return rng.choice(plausible) if plausible and rng.random() < 0.8 else rng.choice(NONSENSE)


def options_of_a_run(trial: Trial) -> int:
    """Up to five options of `fed.run` and of an algorithm at once."""
    rng = trial.rng
    names = [name for name in table(Settings) if name not in SKIPPED_OPTIONS]
    algorithm_class: Any = rng.choice(list(fed.algorithms.registry.values()))
    hyperparameters = {field.name: rng.choice(NONSENSE) for field in fields(algorithm_class) if rng.random() < 0.1}
    options = {name: draw_option(rng, name) for name in rng.sample(names, rng.randint(0, 5))}
    print(algorithm_class.__name__, hyperparameters, options, flush=True)
    with expect_message():
        clients = oracle.ragged_clients(torch.float32, (3, 1, 5))
        fed.run(
            oracle.smooth_model(torch.float32), clients, algorithm_class(**hyperparameters), **({"rounds": 1} | options)
        )
    return 1


BASES = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam,
]  # fmt: skip
OPTIMIZER: dict[str, list[Any]] = {
    "rho": [0.0, 0.05, torch.tensor(0.1), 1e30], "adaptive": [False, True], "eta": [0.01],
    "lr": [0.1, torch.tensor(0.1)], "momentum": [0.9],
    "nesterov": [True], "betas": [(0.9, 0.99), (0.9,), [0.1, 0.2]], "eps": [1e-8], "weight_decay": [0.1],
    "skip_nonfinite": [True], "max_grad_norm": [1.0],
    "stochastic_rounding": [True], "assume_no_alias": [True], "optimizer_in_backward": [True],
    "backend": ["native", "foreach", "reference", "triton"],
    "base_kwargs": [{}, {"lr": 1}],
    "maximize": [True], "amsgrad": [True], "dampening": [0.5], "foreach": [True], "fused": [True], "capturable": [True],
    "differentiable": [True],
    "variant": [getattr(variants, name) for name in variants.__all__],
}  # fmt: skip


def _optimizer(rng: random.Random, params: list[Any]) -> FusedSAM:
    options = {}
    for name in rng.sample(sorted(OPTIMIZER), rng.randint(0, 4)):
        options[name] = rng.choice(OPTIMIZER[name]) if rng.random() < 0.7 else rng.choice(NONSENSE)
        if name == "variant" and isinstance(options[name], type) and is_dataclass(options[name]):
            kind = options[name]
            options[name] = kind(
                **{
                    f.name: rng.choice([*NONSENSE, 0.1, 1, 2])
                    for f in fields(kind)
                    if f.default is MISSING or rng.random() < 0.3
                }
            )
    print(options, flush=True)
    return FusedSAM(params, rng.choice(BASES), **options)


def options_of_the_optimizer(trial: Trial) -> int:
    """Options of `FusedSAM` and of the classes around which it is; a step that is refused leaves the weights."""
    rng = trial.rng
    params = make_parameters([(5, 3), (4,)], rng.choice([torch.float32, torch.float64, torch.bfloat16]))
    with expect_message():
        opt = _optimizer(rng, params)
        for step in range(2):
            backward(params, step)
            old_weights = copies(params)
            try:
                opt.step(partial(backward, params, step))
            except Exception:
                assert same_bits(old_weights, params), "a step that was refused changed the weights"
                raise
    return 1


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from _places(value, (*path, key))


def _damage(rng: random.Random, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace or delete one to three entries of a state dict."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        *parents, key = rng.choice([path for path in _places(state_dict) if path])
        container: Any = state_dict
        for step in parents:
            container = container[step]
        print(parents, key, flush=True)
        old_value = container[key]
        tensors: list[Any] = []
        if isinstance(old_value, torch.Tensor) and old_value.dim() > 0:
            nans = torch.full_like(old_value, torch.nan)
            tensors = [old_value[:1], old_value.double(), old_value.to("meta"), old_value.flatten(), nans]
        if isinstance(container, dict) and rng.random() < 0.2:
            del container[key]
        else:
            container[key] = copy.copy(rng.choice([*tensors * 4, *NONSENSE]))
    return state_dict


def states_of_the_optimizer(trial: Trial) -> int:
    """Load a damaged state dict. If it is refused, the next step must equal the step of an untouched optimizer."""
    rng = trial.rng
    params = make_parameters([(5, 3), (4,)], torch.float32)
    base = rng.choice(BASES[:5])
    opt = FusedSAM(params, base, lr=0.1, backend=rng.choice(["native", "foreach", "reference"]))
    opt.step(partial(backward, params, 0))
    second_params, second_opt = copy.deepcopy((params, opt))
    bad_state = _damage(rng, copy.deepcopy(opt.state_dict()))
    is_refused = True
    with expect_message():
        opt.load_state_dict(bad_state)
        is_refused = False
    if is_refused:
        for p, o in ((params, opt), (second_params, second_opt)):
            o.step(partial(backward, p, 1))
        assert same_bits(params, second_params), "a state that was refused changed the next step"
    else:
        with expect_message():
            opt.step(partial(backward, params, 1))
    return 1


CONFIG = (
    "clients = 4\nalpha = 0.3\nmodel = 'mlp'\nmodel_options = {hidden = [4]}\nrounds = 1\nparticipation = "
    "1.0\nexecutor = 'sequential'\n"
)
WORDS = [
    "", " ", "x", "-1", "0", "1", "2", "0.5", "nan", "inf", "-inf", "1e308", str(10**20), "true", "false", "none",
    "null", "[]", "{}", "[1,2]",
    "a=b", "{a=1}", "../..", "/dev/null", "ä", "auto", "a:b", "x.py:y", "os:system", "'", '"', "\n", "--", "-", "0x10",
    "1_0", ",", ",,", "*",
]  # fmt: skip
SKIPPED_KEYS = ("download", "model", "data_dir", "device")  # keys that take long or download


def _flags(rng: random.Random) -> list[str]:
    """Return flags for up to three keys, with a choice of the key or any word as value."""
    flags = []
    for key in rng.sample([key for key in KEYS if key not in SKIPPED_KEYS], rng.randint(0, 3)):
        choices = [str(choice) for choice in KEYS[key].choices or ()]
        word = rng.choice(choices) if choices and rng.random() < 0.5 else rng.choice(WORDS)
        flag = f"--{key.replace('_', '-')}"
        flags += rng.choice([[flag, word], [f"{flag}={word}"], [flag]])
    return flags


def _command(rng: random.Random) -> list[str]:
    name = rng.choice(["run", "run", "run", "compare", "reproduce", "info", rng.choice(WORDS)])
    if name == "run":
        return [
            name,
            rng.choice(["small.toml"] * 9 + WORDS),
            *_flags(rng),
            *rng.choice([[], [], ["--resume"], ["--trust", rng.choice(WORDS)]]),
        ]
    if name == "compare":
        options = [
            "--seeds", rng.choice([*WORDS, "0"]), "--sweep", rng.choice([*WORDS, "lr=0.1"]), "--surface",
            rng.choice(["0", "x", "-1"]),
        ]  # fmt: skip
        names = rng.choice([*WORDS, "fedavg"])
        return [name, "small.toml", "--algorithms", names, *options[: rng.choice([0, 2, 4, 6])]]
    return [name, rng.choice(WORDS), *rng.choice([[], ["--list"], ["--seeds", rng.choice(WORDS)]])]


def _run_command(words: list[str]) -> None:
    """Run a command. It must end with an exit code, and its error text must be written for users."""
    output = io.StringIO()
    print(words, flush=True)
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            code = cli.main(words)
        except SystemExit as error:  # argparse says how it is used
            code = error.code if isinstance(error.code, int) else 1
    text = output.getvalue()
    assert code in (0, 1, 2), f"{words} ended with {code}"
    assert "Traceback" not in text and "--debug for the traceback" not in text, f"{words}: {text}"
    assert code == 0 or text.strip(), f"{words} ended with {code} and said nothing"


def prepare_command(folder: Path) -> None:
    """Import the modules that a first run imports, and replace drawing, which takes most of a small command's time."""
    from matplotlib.figure import Figure

    Figure.savefig = lambda figure, path, **options: Path(path).write_bytes(b"not drawn")  # type: ignore
    with _working_directory(folder):
        Path("small.toml").write_text(CONFIG)
        _run_command(["run", "small.toml"])


def command_line(trial: Trial) -> int:
    """Flags and values that are next to meaningful ones."""
    with _working_directory(trial.folder):
        Path("small.toml").write_text(CONFIG)
        _run_command(_command(trial.rng))
    return 1


def config_files(trial: Trial) -> int:
    """Run a config file in which some bytes are replaced."""
    with _working_directory(trial.folder):
        data, rng = bytearray(CONFIG.encode()), trial.rng
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(data))
            data[place : place + rng.randint(0, 2)] = rng.choice(
                [b"\0", b"\xff", b"=", b"'", b"\n", b"[", b"9", b"-", b"{", b"e", b"\xc3\xa4"]
            )
        print(bytes(data), flush=True)
        Path("small.toml").write_bytes(data)
        _run_command(["run", "small.toml", "--clients", "3", "--rounds", "1", "--participation", "1"])
    return 1


@contextmanager
def _working_directory(folder: Path) -> Iterator[None]:
    old_folder = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(old_folder)


ATTACKS = (
    Attack("run-options", "nonsense for `fed.run` and the algorithms is taken, or refused by fastsam in words",
        options_of_a_run, share=1.5, values=TIMES),
    Attack("optimizer-options", "the same for `FusedSAM`; a step that is refused leaves the weights",
        options_of_the_optimizer, values=TIMES),
    Attack("optimizer-states", "a state dict that is refused changes nothing", states_of_the_optimizer,
        values=TIMES),
    Attack("command-line", "a command says what is wrong in words that were written for users", command_line,
        prepare_command, share=1.5, values=TIMES),
    Attack("config-files", "so does one with a damaged config file", config_files, prepare_command, share=0.5,
        values=TIMES),
)  # fmt: skip
