"""ViT-B/32, from torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastsam.fed.common.import_paths import vision


def vit_b_32(in_shape: tuple[int, ...], classes: int, weights: str | None = None, **options: Any) -> nn.Module:
    """Return the Vision Transformer B/32 (Dosovitskiy et al., 2021) of torchvision: patches of 32, 12 layers, width
    768, 12 heads, MLP 3072.

    It has 88,224,232 parameters for images [3, 224, 224] and 1000 classes. The head is always new.

    Args:
        in_shape: shape of an image, [3, H, H] with H divisible by 32.
        classes: number of outputs.
        weights: None starts at random; a file with a state dictionary of this model (.pth), or a name that
            torchvision knows ("IMAGENET1K_V1", which it downloads).
        **options: torchvision's own, such as dropout.

    Raises:
        ImportError: torchvision is missing.
        ValueError: the shape is different, or the weights do not fit.
        FileNotFoundError: there is no such file.
        ConnectionError: the weights could not be downloaded.
    """
    if len(in_shape) != 3 or in_shape[0] != 3 or in_shape[1] != in_shape[2] or in_shape[1] % 32:
        raise ValueError(
            f"the model 'vit_b_32' takes images [3, H, H] with H divisible by 32, got samples of the shape "
            f"{tuple(in_shape)}"
        )
    library = vision("torchvision.models", "the model 'vit_b_32'")
    is_named = weights is not None and weights in library.ViT_B_32_Weights.__members__
    try:
        model = library.vit_b_32(weights=weights if is_named else None, image_size=in_shape[1], **options)
    except OSError as error:
        if not is_named:
            raise
        url = library.ViT_B_32_Weights[str(weights)].url
        raise ConnectionError(
            f"the weights {weights} could not be fetched from {url} ({error}); fetch the file elsewhere and say "
            f"weights = '<file>'"
        ) from error
    if weights is not None and not is_named:
        _load(model, weights, list(library.ViT_B_32_Weights.__members__))
    model.heads.head = nn.Linear(model.heads.head.in_features, classes)
    nn.init.zeros_(model.heads.head.weight)  # torchvision's own start of the head
    nn.init.zeros_(model.heads.head.bias)
    return model


def _load(model: nn.Module, path: str, names: list[str]) -> None:
    """Load the weights in a file, without a head. Nothing in the file is run."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"weights: no file {path} (looked in {Path.cwd()}), nor one of {', '.join(names)}")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        backbone = {k: v for k, v in tensors.items() if not k.startswith("heads.")}
        absent, foreign = model.load_state_dict(backbone, strict=False)
    except Exception as error:
        reason = error if isinstance(error, RuntimeError) else type(error).__name__
        raise ValueError(
            f"weights: {path} does not fit the model: {reason}; expected a file that torch.save(model.state_dict(), "
            "path) wrote"
        ) from error
    wrong = [*foreign, *(k for k in absent if not k.startswith("heads."))]
    if wrong:
        raise ValueError(
            f"weights: {path} is not a state dictionary of torchvision's vit_b_32: only one of the two has {wrong[0]!r}"
        )
