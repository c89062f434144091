"""The config of a run: one TOML or JSON file, each key also a flag; every key typed and checked.

Layers, the later wins: defaults, the file, the file's table for the algorithm, flags, flags for the algorithm
(``--fedsam.rho 0.1``). An algorithm's table has its own options, and any key of a run with a different value for this
algorithm. An option outside the table applies to every algorithm of the run that takes it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastsam.fed.algorithms import registry
from fastsam.fed.common.atomic_files import read_bytes, read_json
from fastsam.fed.common.checks import nearest
from fastsam.fed.common.import_paths import is_import_path
from fastsam.fed.common.option import kinds
from fastsam.lab import trust
from fastsam.lab.import_paths import import_object
from fastsam.lab.run_config import KEYS, OPTION_TABLES, TABLES, RunConfig, foreign_keys, short_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# keys that take an import path
IMPORTING = (
    *("data", "model", "loss", "lr", "server_lr", "sampler"),
    *("available", "weighting", "augment", "algorithm", "metrics", "optimizer"),
)
COMPARE_KEYS = ("algorithms", "seeds", "sweep")
LONGEST_NAME = 120  # bytes; the algorithm and a number follow, and a file system takes 255


class ConfigError(ValueError):
    """A config file or flag that cannot be used. The message names the key, what was expected and a remedy."""


@dataclass(frozen=True)
class ConfigSource:
    """The layers of a config, unresolved. `text` layers hold strings from the command line."""

    values: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    compare: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    flag_tables: dict[str, dict[str, str]] = field(default_factory=dict)
    name: str = "run"


def read(path: str | Path, flags: Sequence[str] = ()) -> ConfigSource:
    """Return the layers of a config file, with flags as the last layer.

    Args:
        path: a .toml file, or a .json file such as a run directory's config.json.
        flags: flags of the command line, such as "--lr" and "0.1".

    Raises:
        ConfigError: the file cannot be read, or a flag cannot be used.
        FileNotFoundError: the file does not exist, and all flags have keys that exist.
    """
    path = Path(path)
    is_json = path.suffix == ".json"
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; a run directory's config is {path / 'config.json'}")
    try:
        content = read_json(path) if is_json else tomllib.loads(read_bytes(path).decode())
    except FileNotFoundError:
        _check_flag_keys(flags)  # the value of a mistyped flag is taken for the config
        hint = "`fastsam demo --copy DIR` writes examples"
        raise FileNotFoundError(f"no config file {path} (looked in {Path.cwd()}); {hint}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as {'JSON' if is_json else 'TOML'}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys and values, got {type(content).__name__}")
    tables = {
        key: value for key, value in content.items() if isinstance(value, dict) and key not in {*TABLES, *OPTION_TABLES}
    }
    values = {key: value for key, value in content.items() if key not in tables}
    compare = tables.pop("compare", {})
    for key, value in compare.items():
        if key not in COMPARE_KEYS or not isinstance(value, list):
            raise ConfigError(f"[compare] holds the lists 'algorithms', 'seeds' and 'sweep', got {key} = {value!r}")
    flat, flag_tables = parse_flags(flags)
    return ConfigSource(values, tables, compare, flat, flag_tables, str(values.get("name") or path.stem))


def imports(source: ConfigSource) -> list[tuple[str, str]]:
    """Return the imports of the file as pairs of key and import path, with the imports of [compare].

    Keys that a flag overrides are left out, because the user has typed the flag.
    """
    candidates = [(key, value) for key, value in source.values.items() if key not in source.flags]
    candidates += [item for table in source.tables.values() for item in table.items()]
    metrics = source.values.get("metrics")
    candidates += [("metrics", path) for path in metrics.values()] if isinstance(metrics, dict) else []
    candidates += [("algorithm", name) for name in source.compare.get("algorithms", ())]
    sweeps = [str(text).partition("=") for text in source.compare.get("sweep", ())]
    candidates += [(key.rpartition(".")[2], value) for key, _, values in sweeps for value in values.split(",")]
    return [
        (key, path) for key, path in candidates if key in IMPORTING and isinstance(path, str) and is_import_path(path)
    ]


def show_imports(source: ConfigSource, places: Iterable[Path]) -> list[str]:
    """Return lines that list the imports of a run directory's config, to be read before the run is resumed.

    Raises ConfigError if another user made one of the places, and an import was not named by --trust.
    """
    pairs = imports(source)
    lines = [f"{key} imports {path}" for key, path in pairs]
    foreign_places = [place for place in places if place.exists() and not trust.belongs_to_user(place)]
    untrusted_modules = [module for _, path in pairs if not trust.is_trusted(module := path.rpartition(":")[0])]
    if foreign_places and untrusted_modules:
        trust_flags = " ".join(f"--trust {module}" for module in dict.fromkeys(untrusted_modules))
        raise ConfigError(
            f"{foreign_places[0]} was made by another user, and resuming it runs what its config imports: "
            f"{'; '.join(lines)}. Look at these, and if you trust them add {trust_flags}"
        )
    return lines


def parse_flags(flags: Sequence[str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return flags as a dict of keys and a dict of tables; dashes in keys become underscores.

    ``["--lr", "0.1", "--fedsam.rho=0.2"]`` becomes ({"lr": "0.1"}, {"fedsam": {"rho": "0.2"}}). A key without a value
    means "true". Raises ConfigError if an argument is not a flag.
    """
    flat: dict[str, str] = {}
    tables: dict[str, dict[str, str]] = {}
    words = list(flags)
    while words:
        flag = words.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"expected --key value, got {flag!r}")
        key, equals, value = flag[2:].partition("=")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        table, dot, option = key.rpartition(".")
        if dot:
            tables.setdefault(table, {})[option.replace("-", "_")] = value
        else:
            flat[key.replace("-", "_")] = value
    return flat, tables


def _check_flag_keys(flags: Sequence[str]) -> None:
    """Raise ConfigError if a flag is not a key of a run and not an option of a built-in algorithm."""
    flat, _ = parse_flags(flags)
    for key in flat:
        if key not in KEYS and not takers_of(key) and not is_import_path(flat.get("algorithm", "")):
            raise ConfigError(_unknown_key_message(key, flat.get("algorithm", RunConfig.algorithm), ()))


def algorithm_class(name: str) -> Callable[..., Any]:
    """Return the class for a built-in name or an import path. Raises ConfigError if the name is unknown."""
    if is_import_path(name):
        return import_object(name, "algorithm")
    if name not in registry:
        raise ConfigError(
            f"unknown algorithm {name!r}{nearest(name, registry)}; choose from {', '.join(registry)}, or give "
            "'package.module:Class' or 'file.py:Class'"
        )
    return registry[name]


def algorithm_options(name: str) -> dict[str, Any]:
    """Return the names of an algorithm's options and their types (Any if unknown)."""
    return dict(_options_of(algorithm_class(name)))


@functools.cache
def _options_of(constructor: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a class. Cached, because every run of a comparison needs the options of all algorithms."""
    if dataclasses.is_dataclass(constructor):
        names = [f.name for f in dataclasses.fields(constructor) if f.init]
    else:
        names = list(inspect.signature(constructor).parameters)
    try:
        hints = typing.get_type_hints(constructor)
    except NameError:  # a user's annotations may name what exists for the type checker only
        hints = {}
    return {option: hints.get(option, Any) for option in names}


def resolve(
    source: ConfigSource, algorithm: str | None = None, competitors: Iterable[str] = (), seed: int | None = None
) -> RunConfig:
    """Return the config of one run.

    Args:
        source: layers of the config.
        algorithm: algorithm in place of the source's.
        competitors: other algorithms of the same comparison. An option outside the tables is ignored if only they
            take it.
        seed: seed in place of the source's.

    Raises:
        ConfigError: a key is unknown (the message names the nearest key), is an option of a different algorithm,
            has a wrong type or choice, or has no meaning in this run.
    """
    name = algorithm or (source.values | source.flags).get("algorithm", RunConfig.algorithm)
    if not isinstance(name, str):
        raise ConfigError(f"algorithm must be a string, got {name!r}")
    _check_tables(source, [name, *competitors])
    file_values, values, options = _merge_layers(source, name, competitors)
    values |= {"algorithm": name, "name": values.get("name") or source.name}
    if "/" in values["name"] or len(values["name"].encode()) > LONGEST_NAME:
        raise ConfigError(
            f"name is a part of a directory's name: at most {LONGEST_NAME} bytes without '/', got {values['name']!r}; "
            "--run-dir takes any path"
        )
    if seed is not None:
        values["seed"] = seed
    flag_keys = source.flags.keys() | source.flag_tables.get(short_name(name), {}).keys()
    return RunConfig(**_with_meaning(values, file_values, flag_keys), options=_fill_options(name, options))


def _merge_layers(
    source: ConfigSource, name: str, competitors: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return three dicts of typed values: keys of the file, keys with flags applied, and the algorithm's options."""
    option_types, table_name = algorithm_options(name), short_name(name)
    file_values: dict[str, Any] = {}
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    layers = [(source.values, False, False), (source.tables.get(table_name, {}), True, False)]
    layers += [(source.flags, False, True), (source.flag_tables.get(table_name, {}), True, True)]
    for layer, in_table, text in layers:
        for key, value in layer.items():
            if key in option_types and (in_table or key not in KEYS):
                options[key] = check_type(key, value, kinds(option_types[key]), text)
            elif key in KEYS:
                values[key] = check_type(key, value, _kinds_in_a_file(key), text)
            elif not any(key in algorithm_options(competitor) for competitor in competitors):
                raise ConfigError(_unknown_key_message(key, name, option_types))
        file_values = file_values if text else dict(values)
    for key, rows in OPTION_TABLES.items():
        flags = {name: check_type(name, text, rows[name].kinds, True) for name, text in
                 source.flag_tables.get(key, {}).items()}  # fmt: skip
        if flags:
            file_table = values.get(key) or {}
            values[key] = ({"names": file_table} if isinstance(file_table, list) else file_table) | flags
    return file_values, values, options


def _with_meaning(values: dict[str, Any], file_values: dict[str, Any], flag_keys: Collection[str]) -> dict[str, Any]:
    """Return `values` without keys of the file that a flag has made meaningless, such as `alpha` with ``--split iid``.

    Raises ConfigError if a key without meaning was given as a flag, or it had no meaning in the file either.
    """
    foreign_reasons, file_reasons = (
        foreign_keys(*(keys.get(key, KEYS[key].default) for key in ("data", "split"))) for keys in (values, file_values)
    )
    for key in values:
        if key in foreign_reasons and (key in flag_keys or key in file_reasons):
            raise ConfigError(f"{key} has no meaning here: {foreign_reasons[key]}; remove it")
    return {key: value for key, value in values.items() if key not in foreign_reasons}


def _kinds_in_a_file(key: str) -> tuple[type, ...]:
    """Return the types of a key that a file can express: no callable, no device, a list for any sequence."""
    file_kinds = ({Sequence: list, Mapping: dict}.get(kind, kind) for kind in KEYS[key].kinds)
    return tuple(kind for kind in file_kinds if kind in _FILE_TYPES)


_FILE_TYPES = (bool, int, float, str, dict, list, type(None))  # types that a file can express


def check_type(key: str, value: Any, types: tuple[Any, ...], text: bool = False) -> Any:
    """Return `value` as one of `types`. Values are not checked if `types` has a user's class.

    An integer is a float, nothing else is converted; strings are parsed when `text`. Raises ConfigError if the value
    has a different type.
    """
    if text:
        value = _parse(value, types)
    if float in types and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if set(types) <= {*_FILE_TYPES} and not any(
        isinstance(value, k) and not (k is int and isinstance(value, bool)) for k in types
    ):
        type_names = " or ".join("none" if k is type(None) else k.__name__ for k in types)
        hint = "; a flag without a value means true" if text and value == "true" else ""
        raise ConfigError(f"{key} must be {type_names}, got {value!r} ({type(value).__name__}){hint}")
    return value


def _parse(value: str, types: tuple[Any, ...]) -> Any:
    """Return a flag's text as the first of its key's types that can parse it.

    If no type can, return the text; the type check then raises an error.
    """
    if type(None) in types and value.lower() in ("none", "null"):
        return None
    for kind in types:
        try:
            if kind is bool:
                return {"true": True, "false": False}[value.lower()]
            if kind in (int, float):
                return kind(value)
            if kind is list and not value.startswith("["):
                if str in types and "," not in value:
                    return value
                return [part.strip() for part in value.split(",") if part.strip()]
            if kind not in (str, type(None)):
                return json.loads(value)
        except (ValueError, KeyError, RecursionError):
            continue
    return value


def _fill_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return all options of an algorithm that is a dataclass, defaults included.

    Its checks run here, before anything is trained.
    """
    try:
        instance = algorithm_class(name)(**options)
    except ValueError as error:
        raise ConfigError(f"{short_name(name)}: {error}") from error
    if not dataclasses.is_dataclass(instance):
        return options
    return {option: getattr(instance, option) for option in algorithm_options(name)}


def _check_tables(source: ConfigSource, algorithms: Sequence[str]) -> None:
    """Check that each table belongs to an existing algorithm, and that the algorithm or the run takes its keys.

    Tables of algorithms that do not run this time are checked too.
    """
    names = {short_name(name): name for name in [*registry, *algorithms]}
    for tables in (source.tables, source.flag_tables):
        for table, content in tables.items():
            if table in OPTION_TABLES:
                for key in content.keys() - OPTION_TABLES[table].keys():
                    raise ConfigError(f"in [{table}]: unknown key {key!r}{nearest(key, OPTION_TABLES[table])}")
                continue
            if table not in names:
                raise ConfigError(
                    f"unknown table [{table}]{nearest(table, [*names, 'compare'])}; tables are named after algorithms"
                )
            option_types = algorithm_options(names[table])
            for key in content:
                if key not in option_types and (key not in KEYS or key == "algorithm"):
                    raise ConfigError(f"in [{table}]: {_unknown_key_message(key, names[table], option_types)}")


def takers_of(option: str) -> list[str]:
    """Return the built-in algorithms that have this option."""
    return [name for name in registry if option in algorithm_options(name)]


def _unknown_key_message(key: str, algorithm: str, algorithm_keys: Iterable[str]) -> str:
    takers = takers_of(key)
    if takers:
        options = f"its options are {', '.join(algorithm_keys)}" if algorithm_keys else "it has no options"
        return (
            f"{key} is an option of {', '.join(takers)}, not of {algorithm} ({options}); remove it or put it into the "
            f"table of one of these"
        )
    all_options = {option for name in registry for option in algorithm_options(name)}
    hint = nearest(key, [*KEYS, *algorithm_keys, *all_options])
    return f"unknown key {key!r}{hint}; `fastsam run --help` lists all keys"
