"""Federated averaging, SCAFFOLD and SAM as other libraries have them: the same weights after several rounds.

Not compared, because they are known to be wrong: pfl's SCAFFOLD (a sign), FedLab's FedDyn, the released FedLESAM
optimizer.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fastsam import fed
from tests.helpers import oracle
from tests.helpers.places import HELPERS, ROOT

SCRIPT = HELPERS / "peer" / "federated_peers.py"
PYTHON = Path(os.environ.get("FASTSAM_FED_PEERS", ROOT / ".peers" / "weights" / "bin" / "python"))
ACTIVE = [[0, 3], [1, 2], [0, 4], [2, 3], [1, 4]]
ALONE = [[0]] * 5
RHO = 0.3

# pfl takes the mean over clients in float32. optax adds nothing to the norm, where we add 1e-7.
PEERS = {
    "fedlab-fedavg": (fed.FedAvg(), ACTIVE, 1e-12),
    "fedlab-scaffold": (fed.SCAFFOLD(), ACTIVE, 1e-12),
    "pfl-fedavg": (fed.FedAvg(), ACTIVE, 1e-6),
    "optax-sam": (fed.FedSAM(rho=RHO), ALONE, 1e-6),
}


def peer(name, model, clients, active, folder):
    """Return the library's result for the problem, or skip if it cannot be imported."""
    if not PYTHON.exists():
        pytest.skip(
            f"no Python with the peers at {PYTHON}: `make test-peers` makes one; or name its Python in "
            f"FASTSAM_FED_PEERS"
        )
    arrays = {f"w{i}": p.detach().numpy() for i, p in enumerate(model.parameters())}
    arrays |= {f"x{i}": x.numpy() for i, (x, _) in enumerate(clients)}
    arrays |= {f"y{i}": y.numpy() for i, (_, y) in enumerate(clients)}
    arrays |= {f"active{t}": np.array(ids) for t, ids in enumerate(active)}
    np.savez(folder / "problem.npz", lr=0.05, epochs=2, batch=5, rho=RHO, **arrays)
    command = [str(PYTHON), str(SCRIPT), name, str(folder / "problem.npz"), str(folder / "result.npz")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    skip_where_it_cannot_be_imported(process)
    assert process.returncode == 0, process.stderr
    result = np.load(folder / "result.npz")
    return [torch.from_numpy(result[f"w{i}"]) for i in range(len(result.files))]


def skip_where_it_cannot_be_imported(import_result):
    """A library that is not there, or whose parts do not fit together, in the words of its last error."""
    last = import_result.stderr.strip().splitlines()[-1] if import_result.returncode else ""
    if last.startswith(("ModuleNotFoundError", "ImportError")):
        pytest.skip(last)


@pytest.mark.parametrize(
    "last", ["ImportError: libcudart.so.99: no such file", "ModuleNotFoundError: No module named 'pfl'"]
)
def test_a_peer_that_cannot_be_imported_is_skipped_with_the_reason(last):
    with pytest.raises(pytest.skip.Exception, match=last[:20]):
        skip_where_it_cannot_be_imported(subprocess.CompletedProcess([], 1, stderr=f"Traceback ...\n{last}\n"))
    skip_where_it_cannot_be_imported(subprocess.CompletedProcess([], 1, stderr="ValueError: ImportError\n"))
    skip_where_it_cannot_be_imported(subprocess.CompletedProcess([], 0, stderr=f"{last}\n"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_the_same_weights_as_another_library(name, tmp_path, capsys):
    algorithm, active, tolerance = PEERS[name]
    model, sizes = oracle.smooth_model(), (17, 16, 3, 23, 12)
    clients = [(x.float().double(), y) for x, y in oracle.ragged_clients(sizes=sizes)]  # pfl holds data in float32
    actual = fed.run(
        model, clients, algorithm, rounds=5, local_epochs=2, batch_size=5, lr=0.05, shuffle=False,
        sampler=lambda t, generator: active[t],
    ).model  # fmt: skip
    expected = peer(name, model, clients, active, tmp_path)
    gaps = [p.detach() - q for p, q in zip(actual.parameters(), expected, strict=True)]
    far = oracle.flat_norm(gaps) / oracle.flat_norm(expected)
    with capsys.disabled():
        print(f"{name}: relative difference {far:.2e}", file=sys.stderr)
    assert far < tolerance
    assert oracle.difference(actual, model) > 1e-3
