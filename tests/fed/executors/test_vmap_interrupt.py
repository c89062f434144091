"""Ctrl-C inside of torch.vmap, wherever it comes: it is not taken for a model that cannot be mapped, and nothing stays
mapped."""

from pathlib import Path

import pytest
import torch
import torch._functorch
from torch import nn
from torch._C import _functorch

from fastsam.fed.executors import LocalOptions, Setup, stacked
from tests.helpers.interrupting import Interrupt, Tracer
from tests.helpers.setups import setup_of

# functions that open and close levels of mapping
TORCH = (str(Path(torch._functorch.__file__).parent / "vmap.py"),)


def _setup() -> Setup:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    example = torch.randn(4, 6), torch.arange(4) % 3
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)  # mapped too
    return setup_of(model, options=LocalOptions(slots=2), loss=loss, example=example)


def test_an_interrupt_of_the_trial_comes_out_and_leaves_nothing_mapped() -> None:
    setup = _setup()
    assert stacked.why_not(setup) is None
    with Tracer(None, TORCH) as all_of_it:
        stacked.why_not(setup)
    assert all_of_it.lines > 50
    for line in range(all_of_it.lines):
        with Tracer(line, TORCH) as tracer, pytest.raises(Interrupt):
            stacked.why_not(setup)
        assert _functorch.get_dynamic_layer_stack_depth() == 0, tracer.where
    assert stacked.why_not(setup) is None
