"""Layers of a model that algorithms speak of."""

from __future__ import annotations

from torch import nn


def last_layer(model: nn.Module) -> str:
    """Return the name of the last module that has trainable parameters outside of its submodules. It is "" for the
    model itself, and for a model without trainable parameters."""
    names = [name for name, m in model.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    return names[-1] if names else ""
