"""Functional-SAM around AdamW, with a preconditioned perturbation (Singh et al., ICML 2025, arXiv 2502.02407).

    python examples/functional_sam.py

The gradient of the update is J(w + e)^T dL/dF(w): the Jacobian of the model's outputs F is taken at the perturbed
weights, and the gradient of the loss L with respect to the outputs at the weights themselves. SAM takes both at the
perturbed weights. Its sharpness may then fall because only the outputs change. The second backward pass begins at the
outputs here, with the gradient that the first pass found, so that it needs no loss. A small language model learns
sentences that are drawn from a chain of words: put your own text and model in their place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastsam import SAM, FusedSAM, variants

WORDS, LENGTH = 32, 16


def step(opt: FusedSAM, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Make a step of Functional-SAM and return the loss.

    Args:
        inputs: words, int64 `[n, length]`.
        targets: the words that follow, int64 `[n, length]`.
    """
    outputs = model(inputs)  # F(w)
    loss = F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    (output_grads,) = torch.autograd.grad(loss, outputs)  # dL/dF(w)
    outputs.backward(output_grads)  # J(w)^T dL/dF(w), the gradient of the loss
    opt.first_step(zero_grad=True)
    model(inputs).backward(output_grads)  # J(w + e)^T dL/dF(w)
    opt.second_step(zero_grad=True)
    return loss.detach()


def draw_text(sentences: int, seed: int) -> Tensor:
    """Return sentences of a chain in which four words follow each word, int64 `[sentences, LENGTH + 1]`."""
    followers = torch.randint(WORDS, (WORDS, 4), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(WORDS, (sentences,), generator=generator)]
    for _ in range(LENGTH):
        words.append(followers[words[-1], torch.randint(4, (sentences,), generator=generator)])
    return torch.stack(words, 1)


def train(variant: SAM, is_functional: bool, steps: int = 200) -> float:
    """Return the loss of held-out sentences after a training, nats per word."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, WORDS))
    opt = FusedSAM(model.parameters(), torch.optim.AdamW, variant=variant, lr=1e-2)
    text = draw_text(64, seed=1)

    def closure() -> Tensor:
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        return loss

    for number in range(steps):
        batch = text[8 * number % 64 :][:8]
        if is_functional:
            step(opt, model, batch[:, :-1], batch[:, 1:])
        else:
            opt.step(closure)
    test = draw_text(256, seed=2)
    with torch.no_grad():
        return float(F.cross_entropy(model(test[:, :-1]).flatten(0, 1), test[:, 1:].flatten()))


if __name__ == "__main__":
    for name, variant, is_functional in (
        ("AdamW", SAM(rho=0.0), False),
        ("SAM", SAM(rho=0.1), False),
        ("preconditioned SAM", variants.PreconditionedSAM(rho=0.1), False),
        ("Functional-SAM", SAM(rho=0.1), True),
        ("preconditioned Functional-SAM", variants.PreconditionedSAM(rho=0.1), True),
    ):
        print(f"{name}: held-out loss {train(variant, is_functional):.3f}")
