"""A million clients that are loaded when they train."""

import json
import subprocess
import sys

import pytest

from tests.helpers.places import ROOT

CODE = """
import json, resource, time
import torch
from fastsam import fed

def load(client):
    loaded.append((client, time.perf_counter()))
    generator = torch.Generator().manual_seed(client)
    return torch.randn(8, 6, generator=generator), torch.arange(8) % 3

loaded = []
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
began = time.perf_counter()
result = fed.run(
    model, fed.LazyClients(1_000_000, load), fed.SCAFFOLD(), rounds=3, cohort=20, test=load(0), callbacks=[]
)
first = next(moment for client, moment in loaded[1:])
print(json.dumps({
    "clients": len({client for client, _ in loaded}), "start": first - began,
    "kilobytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
}))
"""


@pytest.mark.slow
def test_a_million_clients_start_within_two_seconds_below_one_gigabyte():
    process = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    record = json.loads(process.stdout)
    assert record["clients"] <= 3 * 20 + 2
    assert record["start"] < 2, "seconds until the first client is loaded"
    assert record["kilobytes"] < 1e6
