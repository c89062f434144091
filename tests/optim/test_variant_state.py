"""What the variants of SAM keep: saved, resumed, taken back, and not mixed up."""

from __future__ import annotations

import pytest
import torch

from fastsam import FusedSAM
from fastsam.optim.variants import VaSSO
from tests.helpers.sam_oracle import copies, make_parameters, same_bits
from tests.helpers.variant_cases import CASES, fused, problem


def test_a_parameter_without_a_gradient_keeps_what_it_remembers() -> None:
    params = make_parameters([(4,), (3,)], torch.float32)
    opt = FusedSAM(params, lr=0.1, sam=VaSSO(theta=0.5))
    for grads in ((1.0, 2.0), (3.0, None), (None, None)):
        for _ in range(2):
            for p, g in zip(params, grads, strict=True):
                p.grad = None if g is None else torch.full_like(p, g)
            (opt.second_step if opt.is_perturbed else opt.first_step)()
    kept = [opt.state_dict()["state"][i]["sam_memory"] for i in range(2)]
    assert kept[0].tolist() == [0.5 * 0.5 + 0.5 * 3.0] * 4 and kept[1].tolist() == [1.0] * 3


def test_first_gradients_with_inf_are_not_remembered() -> None:
    training = fused(CASES["friendly"].sam, "sgd", 2)
    before = copies([e["sam_memory"] for e in training.opt.state_dict()["state"].values()])
    for p in training.params:
        p.grad = torch.full_like(p, torch.inf)
    training.opt.first_step()
    training.backward(2)
    training.opt.second_step()
    assert same_bits(before, [e["sam_memory"] for e in training.opt.state_dict()["state"].values()])


def test_what_is_remembered_has_the_scale_of_no_step() -> None:
    """Resumed with another scale of the GradScaler, which the second process does not know before its first step."""
    ends = []
    for resumes in (False, True):
        training, scaler = (
            fused(CASES["friendly"].sam, "sgd", 0),
            torch.amp.GradScaler("cpu", 2.0**10, growth_interval=3),
        )
        for t in range(6):
            if resumes and t == 4:
                again = fused(CASES["friendly"].sam, "sgd", 0)
                with torch.no_grad():
                    for p, q in zip(again.params, training.params, strict=True):
                        p.copy_(q)
                again.opt.load_state_dict(training.opt.state_dict())
                saved, scaler = scaler.state_dict(), torch.amp.GradScaler("cpu", 2.0**4, growth_interval=3)
                scaler.load_state_dict(saved)
                training = again
            for _ in range(2):
                training.opt.zero_grad()
                scaler.scale(problem()[1](training.params, t)).backward()
                training.opt.is_perturbed or training.opt.first_step()
            scaler.step(training.opt)
            scaler.update()
        ends.append(training.params)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("saved", "loads", "refused"),
    [
        ("looksam", "gsam", True),
        ("gsam", "looksam", False),
        ("wsam", "every other", False),
        ("looksam", "looksam", False),
    ],
)
def test_the_state_of_another_variant(saved: str, loads: str, refused: bool) -> None:
    state = fused(CASES[saved].sam, "sgd", 2).opt.state_dict()
    training = fused(CASES[loads].sam, "sgd", 1)
    before = copies(training.params)
    if refused:
        with pytest.raises(ValueError, match="of LookSAM, which keeps a vector, .* optimizer's is GSAM"):
            training.opt.load_state_dict(state)
    else:
        training.opt.load_state_dict(state)
    assert same_bits(before, copies(training.params))
    training.steps(range(1, 3))


def test_the_state_of_another_variant_between_its_passes() -> None:
    training, other = fused(CASES["gsam"].sam, "sgd", 1), fused(CASES["wsam"].sam, "sgd", 0)
    training.backward(1)
    training.opt.first_step()
    with pytest.raises(ValueError, match="of GSAM, between its two passes"):
        other.opt.load_state_dict(training.opt.state_dict())
