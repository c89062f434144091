"""The benchmark of SAM's variants: nobody is left out, a step is one of its variant, and the bytes are those of the
page."""

from __future__ import annotations

import re

import pytest
import torch

from bench import family
from bench.contenders import SGD_OPTIONS, parameters
from bench.problem import Gradients, Size, initial_weights
from bench.timing import Clock
from fastsam import SAM, FusedSAM, variants
from tests.helpers.places import ROOT

TINY = Size("tiny", "tiny", ((40, 25), (40,)), steps=2, rounds=2)


def test_every_variant_is_there() -> None:
    kinds = {
        kind for name in variants.__all__ if isinstance(kind := getattr(variants, name), type) and issubclass(kind, SAM)
    }
    assert {type(entry.sam) for entry in family.ENTRIES.values()} == kinds


def test_the_bytes_are_those_of_the_page() -> None:
    rows = (ROOT / "docs" / "variants.md").read_text().split("| variant | rule |")[1].split("\n\n")[0].splitlines()[2:]
    page = {"WSAM": "64", "LookSAM": f"{(96 + 9 * 32) / 10:g}"}
    for row in rows:
        name = re.findall(r"\w+", row)[0]
        page.setdefault(name, row.rsplit("|", 2)[1].split()[0])
    for name, entry in family.ENTRIES.items():
        if name in page:
            assert page[name] == f"{entry.floor:g}", name


@pytest.mark.parametrize("name", ["SAM", "WSAM", "LookSAM", "MSAM"])
def test_a_step_is_a_training_loops(name: str) -> None:
    weights, gradients = initial_weights(TINY.shapes), Gradients(TINY.shapes)
    drive = family.Drive(family.Ours(weights, family.ENTRIES[name]), gradients, Clock())
    params, passes = parameters(weights), iter(range(100))
    opt = FusedSAM(params[1:] + params[:1], torch.optim.SGD, sam=family.ENTRIES[name].sam, **SGD_OPTIONS)

    def closure() -> None:
        for p, g in zip(params, gradients.tensors(next(passes)), strict=True):
            p.grad = g.clone()

    for _ in range(3):
        drive.step()
        opt.step(closure)
    for found, expected in zip(drive.stepper.weights(), params, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-8)


def test_a_record_and_its_page() -> None:
    result = family.run(TINY, 1, 2)
    assert [row["name"] for row in result["variants"]] == list(family.ENTRIES)
    sam = result["variants"][0]
    assert sam["to_sam"]["median"] == 1.0 and (sam["kernels"], sam["torch_calls"]) == (3.0, 0.0)
    facts = {
        "command": "c", "date": "2026-01-01T00", "commit": "0" * 40, "machine": {"cpu": "x"},
        "versions": {"torch": "2", "pytorch-optimizer": "4"},
    }  # fmt: skip
    text = family.PAGE.fill("<!-- family:last -->\n<!-- /family -->", {"environment": facts, "results": [result]})
    assert "| `SAM` | 1.00 | 1.00–1.00 | 40 |" in text and "commit `000000000000`" in text
