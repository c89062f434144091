"""Data sets: the digits, FederatedData, a user's files and functions."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsam import fed
from fastsam.fed.data import (
    as_tensors,
    digits,
    from_client_files,
    from_npz,
    handwritten,
    split_data,
    stratified_test,
)
from fastsam.lab.experiment import from_function


def pooled_arrays(n: int = 60, classes: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(n, 4, 4)), "y": np.arange(n) % classes}


def test_sets_that_people_look_for_next_to_the_digits() -> None:
    assert [getattr(fed, name) for name in ("digits", "cifar10", "cifar100", "emnist")] == [
        fed.data.SETS[name] for name in ("digits", "cifar10", "cifar100", "emnist")
    ]


def test_digits_sizes_scale_and_classes() -> None:
    data = digits()
    assert (len(data), data.classes, data.name, data.in_shape) == (50, 10, "digits", (1, 8, 8))
    assert [len(y) for _, y in data] == [65] + [28] * 49 and len(digits(clients=1437)) == 1437
    x, y = data.test
    assert x.shape == (360, 1, 8, 8) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert data.priors is not None and data.priors.shape == (50, 10)
    train = torch.cat([x for x, _ in digits(split="iid")])  # iid holds every training image once
    assert len(train) == 1437
    assert train.double().mean().item() == pytest.approx(0, abs=1e-6)
    assert train.double().std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_digits_are_read_without_scikit_learns_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with them, where its file is not there."""
    result = handwritten.load()
    monkeypatch.setattr(handwritten, "FILE", "datasets/data/elsewhere.csv")
    for a, b in zip(result, handwritten.load(), strict=True):
        assert torch.equal(a, b)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert torch.equal(handwritten.load()[0], result[0])


def test_digits_test_set_does_not_move_with_the_split() -> None:
    a, b = digits(clients=10, seed=1), digits(clients=100, alpha=5.0, seed=2)
    assert torch.equal(a.test[0], b.test[0]) and torch.equal(a.test[1], b.test[1])
    assert not np.array_equal(a.class_counts().sum(axis=0), b.class_counts().sum(axis=0))


def test_class_counts_add_up() -> None:
    data = digits(clients=20)
    counts = data.class_counts()
    assert counts.shape == (20, 10)
    assert counts.sum(axis=1).tolist() == [len(y) for _, y in data]
    assert counts[3].tolist() == [(data[3][1] == c).sum().item() for c in range(10)]


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.9])
def test_stratified_test_keeps_the_class_ratios(fraction: float) -> None:
    labels = np.random.default_rng(3).choice(4, size=997, p=[0.1, 0.2, 0.3, 0.4])
    train, test = stratified_test(labels, fraction)
    assert sorted([*train, *test]) == list(range(997))
    assert len(test) == int(np.ceil(fraction * 997))
    share = np.bincount(labels) * len(test) / 997
    assert (np.abs(np.bincount(labels[test], minlength=4) - share) < 1).all()
    assert np.array_equal(stratified_test(labels, fraction)[1], test)


def test_as_tensors_reads_the_types_people_have() -> None:
    x, y = as_tensors(np.full((2, 3), 255, dtype=np.uint8), np.array([[1], [0]], dtype=np.int32))
    assert x.dtype == torch.float32 and x.eq(1).all() and y.tolist() == [1, 0] and y.dtype == torch.int64
    assert as_tensors(np.zeros((2, 3)), [0, 1])[0].dtype == torch.float64
    assert as_tensors(np.zeros((2, 3), dtype=np.int32), np.array([0.0, 1.0]))[0].dtype == torch.int64
    assert as_tensors(torch.ones(2, 3), torch.tensor([0, 1]))[0].dtype == torch.float32
    with pytest.raises(ValueError, match="NaN or infinity"):
        as_tensors(np.array([[np.nan]]), [0])


def test_npz_with_a_test_set_of_its_own(tmp_path: Path) -> None:
    arrays = pooled_arrays()
    file = tmp_path / "mine.npz"
    np.savez(file, x_train=arrays["x"], y_train=arrays["y"], x_test=arrays["x"][:7], y_test=arrays["y"][:7])
    data = from_npz(file, clients=6, split="iid", seed=1)
    assert (len(data), data.name, data.classes, len(data.test[1])) == (6, "mine", 3, 7)
    assert torch.equal(data.test[0], torch.from_numpy(arrays["x"][:7]))
    assert sum(len(y) for _, y in data) == 60


def test_npz_without_a_test_set_gives_up_a_part(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    np.savez(file, **pooled_arrays())
    data = from_npz(file, clients=6, split="dirichlet", seed=1, alpha=1.0, test_fraction=0.25)
    assert len(data.test[1]) == 15 and torch.bincount(data.test[1]).tolist() == [5, 5, 5]
    assert sum(len(y) for _, y in data) == 45


def test_client_files_and_their_test_file(tmp_path: Path) -> None:
    arrays = pooled_arrays()
    for i, part in enumerate((slice(0, 10), slice(10, 13), slice(13, 60))):
        np.savez(tmp_path / f"c{i}.npz", x=arrays["x"][part], y=arrays["y"][part])
    np.savez(tmp_path / "test.npz", x=arrays["x"][:5], y=arrays["y"][:5])
    data = from_client_files(str(tmp_path / "*.npz"), tmp_path / "test.npz")
    assert [len(y) for _, y in data] == [10, 3, 47]
    assert len(data.test[1]) == 5 and data.priors is None
    with pytest.raises(FileNotFoundError, match="no file matches"):
        from_client_files(str(tmp_path / "none*.npz"), tmp_path / "test.npz")


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ({"images": np.zeros(3)}, {}, "has no array 'x_train' or 'x'; it has 'images'"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, 1])}, {}, "x has 3 samples and y 2 labels"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, 1, 9])}, {"classes": 2}, "0..1"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, {}, "there are no samples"),
        ({"x": np.zeros((2, 2)), "y": np.array([0, 10**12])}, {},
         "must be class numbers from 0, got 1000000000000 at position 1"),
        ({"x": np.array([{}], dtype=object), "y": np.array([0])}, {}, "allow_pickle=False"),
        (b"x,y\n1,2\n", {}, "plain arrays .it is no file of numpy's.. Write it with"),
        (b"PK\x03\x04 and the rest is lost", {}, "not a complete .npz file of plain arrays"),
    ],
)  # fmt: skip
def test_bad_files_say_what_is_wrong(content: Any, options: dict[str, int], words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        np.savez(file, **content)
    with pytest.raises(ValueError, match=words):
        from_npz(file, clients=2, split="iid", **options)


def test_no_file_and_a_file_of_one_array(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no data file"):
        from_npz(tmp_path / "mine.npz", clients=2, split="iid")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match="one array without a name"):
        from_npz(tmp_path / "one.npy", clients=2, split="iid")


FUNCTION = """
import numpy as np
def make(n=4, bad=False):
    x, y = np.ones((n, 3)), np.arange(n) % 2
    return ([(x, y), (x[:1], y[:1])], (x, y)) if not bad else 7
"""


def test_a_users_function_by_file_and_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_fed_data.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    for path in ("my_fed_data.py:make", "my_fed_data:make"):
        data = from_function(path, {"n": 5})
        assert ([len(y) for _, y in data], data.classes, data.name) == ([5, 1], 2, "make")
    with pytest.raises(ValueError, match="must return a FederatedData or a pair"):
        from_function("my_fed_data.py:make", {"bad": True})
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'm'; it takes \(n=4, bad=False\)"):
        from_function("my_fed_data.py:make", {"m": 5})
    with pytest.raises(ValueError, match="has no 'mak'; it defines make, np"):
        from_function("my_fed_data.py:mak", {})
    with pytest.raises(ValueError, match="no file other.py"):
        from_function("other.py:make", {})
    with pytest.raises(ValueError, match="no module 'no_such_module'"):
        from_function("no_such_module:make", {})


FORMS = """
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from fastsam import fed

x, y = torch.arange(24.0, dtype=torch.float64).view(12, 2), torch.arange(12) % 3
pool = TensorDataset(x, y)

class Own(Dataset):
    def __init__(self, draws=False):
        self.draws = draws
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return x[i] + (torch.rand(2) if self.draws else 0), int(y[i])

def make(kind):
    forms = {
        "split": lambda: fed.split(pool, clients=3, alpha=1.0),
        "split of another set": lambda: fed.split(Own(), clients=3, alpha=None),
        "data sets": lambda: [pool, Own(), list(zip(x, y))],
        "loaders": lambda: [DataLoader(pool, batch_size=4), DataLoader(Own(), shuffle=True)],
        "random": lambda: [Own(draws=True)],
        "ragged": lambda: [[(torch.ones(n), 0) for n in (2, 3)]],
        "dicts": lambda: [{"x": x, "y": y}],
        "nothing": lambda: [pool, []],
    }
    return forms[kind](), Own()
"""


@pytest.mark.parametrize("kind", ["split", "split of another set", "data sets", "loaders"])
def test_a_users_function_returns_clients_as_a_run_takes_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_forms.py").write_text(FORMS)
    monkeypatch.chdir(tmp_path)
    data = from_function("my_forms.py:make", {"kind": kind})
    x, y = data.test
    rows = {tuple(a): b for a, b in zip(x.tolist(), y.tolist(), strict=True)}
    for a, b in data:
        assert a.dtype == torch.float64 and [rows[tuple(row)] for row in a.tolist()] == b.tolist()
    model = torch.nn.Linear(2, 3)
    assert len(fed.run(model, data, fed.FedAvg(), rounds=1, participation=1.0).history) == 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("random", "client 0: reading a sample draws random numbers.*the key augment"),
        ("ragged", "client 0: its samples make no batch. The commands take one input"),
        ("dicts", r"client 0 must have samples \(x, y\), got dict. .*fed.run takes other samples"),
        ("nothing", "client 1 has no samples"),
    ],
)
def test_clients_that_the_commands_cannot_read(
    kind: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_forms.py").write_text(FORMS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        from_function("my_forms.py:make", {"kind": kind})


def test_a_users_module_that_fails_keeps_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_data.py").write_text("import surely_not_installed\n")
    monkeypatch.chdir(tmp_path)
    for path in ("broken_data.py:make", "broken_data:make"):
        with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
            from_function(path, {})


def test_split_data_counts_classes_of_the_test_set_too() -> None:
    x, y = torch.zeros(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    data = split_data(x, y, (x[:1], torch.tensor([4])), clients=2, split="iid")
    assert data.classes == 5
