"""Data sets that a user has in ``.npz`` files."""

from __future__ import annotations

import glob
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fastsam.fed.common.atomic_files import open_regular
from fastsam.fed.data.federated import FederatedData, as_tensors, split_data, stratified_test


def from_npz(
    path: str | Path, *, test_fraction: float = 0.2, classes: int | None = None, **split: Any
) -> FederatedData:
    """Deal one pooled ``.npz`` file out to clients.

    Its arrays are ``x_train, y_train`` and, if there is a test set, ``x_test, y_test`` (the names of Keras' files), or
    ``x, y``. `as_tensors` says how types are read.

    Args:
        path: path of the file.
        test_fraction: share of the samples that becomes a stratified test set, if the file has none.
        classes: number of classes; default: one more than the largest label.
        **split: arguments of `split_data`.

    Raises:
        ValueError: an array is missing, or has bad contents.
        FileNotFoundError: the file does not exist.
    """
    arrays = _read(path)
    train = _array(arrays, path, "x_train", "x"), _array(arrays, path, "y_train", "y")
    x, y = as_tensors(*train, classes, f"{path}: training data")
    if "x_test" in arrays or "y_test" in arrays:
        test = as_tensors(_array(arrays, path, "x_test"), _array(arrays, path, "y_test"), classes, f"{path}: test data")
    else:
        train_ids, test_ids = stratified_test(y.numpy(), test_fraction)
        test = (x[test_ids], y[test_ids])
        x, y = x[train_ids], y[train_ids]
    return split_data(x, y, test, classes=classes, name=Path(path).stem, **split)


def from_client_files(pattern: str, test_path: str | Path, classes: int | None = None) -> FederatedData:
    """Return the clients of one ``.npz`` file each (arrays ``x, y``), in the order of their sorted names.

    Args:
        pattern: pattern of the files' names, as for the shell: ``clients/*.npz``.
        test_path: the ``.npz`` file of the common test set (``x, y`` or ``x_test, y_test``). It is not a client if
            the pattern matches it.
        classes: number of classes; default: one more than the largest label.
    """
    test_arrays = _read(test_path)
    test = as_tensors(
        _array(test_arrays, test_path, "x_test", "x"),
        _array(test_arrays, test_path, "y_test", "y"),
        classes,
        str(test_path),
    )
    paths = sorted(p for p in glob.glob(pattern) if Path(p).resolve() != Path(test_path).resolve())
    if not paths:
        raise FileNotFoundError(f"no file matches {pattern!r} in {Path.cwd()}")
    clients = []
    for path in paths:
        arrays = _read(path)
        clients.append(
            as_tensors(_array(arrays, path, "x", "x_train"), _array(arrays, path, "y", "y_train"), classes, path)
        )
    if classes is None:
        classes = 1 + max(int(y.max()) for _, y in [*clients, test])
    return FederatedData(clients, test, classes, Path(pattern).parent.name or "clients")


def _read(path: str | Path) -> dict[str, np.ndarray]:
    try:
        with open(open_regular(Path(path), os.O_RDONLY), "rb") as file:
            archive = np.load(file, allow_pickle=False)  # a pickle could run code
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array without a name")
            return {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise FileNotFoundError(f"no data file {path} (looked in {Path.cwd()})") from None
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        # numpy takes any other file for a pickle, and its message explains how to load one.
        reason = error if "pickle" not in str(error) or zipfile.is_zipfile(path) else "it is no file of numpy's"
        raise ValueError(
            f"{path} is not a complete .npz file of plain arrays ({reason}). Write it with numpy.savez(path, x=..., "
            "y=...)"
        ) from error


def _array(arrays: dict[str, np.ndarray], path: str | Path, *names: str) -> np.ndarray:
    for name in names:
        if name in arrays:
            return arrays[name]
    raise ValueError(
        f"{path} has no array {' or '.join(map(repr, names))}; it has {', '.join(map(repr, arrays)) or 'none'}"
    )
