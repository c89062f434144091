"""Optimizers that commit 59d46cb saved, and how they train on: keys of state dicts and pickles outlive a rename."""

import gzip
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastsam import FusedSAM, variants

VARIANTS = {
    "halves": variants.GSAM(0.5, alpha=0.25, interval=2, rho_fn=variants.LESAM(sigma=2.0)),
    "between": variants.VaSSO(0.5, theta=0.5),
    "one pass": variants.MSAM(0.5),
}
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "halves": (torch.optim.SGD, {"momentum": 0.5, "skip_nonfinite": True, "assume_no_alias": True}),
    "between": (torch.optim.AdamW, {}),
    "one pass": (torch.optim.SGD, {"momentum": 0.5}),
}
TARGETS = [torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64), torch.tensor([[1.0], [4.0]], dtype=torch.float64)]


def _read_record(name: str) -> dict[str, Any]:
    """Return what the file holds of one optimizer.

    The script that wrote it, with `TARGETS`, `VARIANTS`, `BASES`, `_backward` and `_finish` as here, and
    `sam=`, `every=`, `radius=`, `two_passes` as commit 59d46cb calls them:

        params = [nn.Parameter(torch.ones_like(t)) for t in TARGETS]
        opt = FusedSAM(params, base, sam=VARIANTS[name], backend="reference", lr=0.25, **options)
        for step in range(2):
            if opt.two_passes:
                _backward(params)
                opt.first_step()
            _backward(params)
            opt.step()
        if name == "halves":
            _backward(params)
            opt.first_step()
        stored = {"weights": [p.detach().clone() for p in params], "state_dict": opt.state_dict()}
        torch.save({"params": params, "optimizer": opt}, file := io.BytesIO())
        _finish(params, opt)
        stored |= {"pickle": file.getvalue(), "after": [p.detach().clone() for p in params]}

    The values of all names went through `torch.save` and `gzip -9`.
    """
    with gzip.open(Path(__file__).with_name("checkpoints_59d46cb.pt.gz")) as file:
        record: dict[str, Any] = torch.load(file, weights_only=True)[name]
    return record


def _backward(params: list[nn.Parameter]) -> None:
    for p, target in zip(params, TARGETS, strict=True):
        p.grad = 2 * (p.detach() - target)


def _finish(params: list[nn.Parameter], opt: FusedSAM) -> None:
    """Finish the step that is under way, if any, and make more, three in all."""
    for _ in range(3):
        if opt.perturbs and not opt.is_perturbed:
            _backward(params)
            opt.first_step()
        _backward(params)
        opt.step()


def _assert_same(params: list[nn.Parameter], expected: list[Tensor]) -> None:
    for p, value in zip(params, expected, strict=True):
        # Processors differ in fused multiply-adds only.
        torch.testing.assert_close(p.detach(), value, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_pickle_of_an_older_version_trains_on(name: str) -> None:
    record = _read_record(name)
    objects = torch.load(io.BytesIO(record["pickle"]), weights_only=False)
    params, opt = objects["params"], objects["optimizer"]
    assert repr(opt._engine.variant) == repr(VARIANTS[name])
    assert opt.skip_nonfinite == BASES[name][1].get("skip_nonfinite", False)
    _finish(params, opt)
    _assert_same(params, record["after"])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_state_dict_of_an_older_version_trains_on(name: str) -> None:
    record = _read_record(name)
    base, options = BASES[name]
    params = [nn.Parameter(weights.clone()) for weights in record["weights"]]
    opt = FusedSAM(params, base, variant=VARIANTS[name], backend="reference", lr=1.0, **options)
    opt.load_state_dict(record["state_dict"])
    assert opt.is_perturbed == (name == "halves")
    _finish(params, opt)
    _assert_same(params, record["after"])
