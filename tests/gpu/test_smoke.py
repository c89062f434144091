"""The first look at a GPU, in ten seconds: every backend, a captured graph and a row program against the reference.

A backend that is missing fails here, because a machine with a GPU is expected to have both.
"""

import pytest
import torch

from fastsam import backends, fed
from fastsam_kernels import reference
from tests.helpers.gpu_step import DEVICE, Step

LENGTHS = [33, 0, 70_001, 8193]


@pytest.mark.parametrize("uses_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_two_steps_agree_with_the_reference(backend: str, uses_graph: bool) -> None:
    choice = next(b for b in backends.table() if (b.name, b.device) == (backend, DEVICE))
    assert choice.reason is None, choice.reason
    kernels, step, expected = choice.load(), Step(LENGTHS, rows=2), Step(LENGTHS, rows=2, device="cpu")
    step.run(kernels)  # compiles, and fills the tables that a capture must find
    if uses_graph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.run(kernels)
        graph.replay()
    else:
        step.run(kernels)
    for _ in range(2):
        expected.run(reference)
    for a, b in zip(step.read(), expected.read(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_row_program_agrees_with_clients_one_by_one() -> None:
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(40, 64, generator=draw), torch.randint(10, (40,), generator=draw)) for _ in range(4)]
    weights = []
    for executor, device in (("sequential", "cpu"), ("vmap", DEVICE)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        options = {"rounds": 2, "batch_size": 16, "participation": 1.0, "executor": executor, "device": device}
        result = fed.run(model, clients, fed.FedSAM(), **options)
        weights.append(torch.cat([p.detach().flatten().cpu() for p in result.model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
