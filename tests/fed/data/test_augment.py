"""Augmentation: possible results for a sample, their frequency, and that they depend only on the generator."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsam import fed
from fastsam.fed.data import AUGMENTS, FlipCrop
from fastsam.fed.data.augment import augment_by_name


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def variants(image: torch.Tensor, pad: int) -> dict[bytes, tuple[bool, int, int]]:
    """Every image that a flip and a crop of `image` [C, H, W] can give, by (flipped, down, right)."""
    results = {}
    for is_flipped in (False, True):
        padded_image = F.pad(image.flip(-1) if is_flipped else image, (pad,) * 4)
        for dy in range(2 * pad + 1):
            for dx in range(2 * pad + 1):
                crop = padded_image[:, dy : dy + image.shape[1], dx : dx + image.shape[2]]
                results[crop.contiguous().numpy().tobytes()] = (is_flipped, dy, dx)
    return results


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 3), st.integers(2, 7), st.integers(2, 7)),
    pad=st.integers(0, 4),
    flip=st.sampled_from([0.0, 0.5, 1.0]),
    crop=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_every_sample_is_flipped_and_cropped(seed: int, shape: tuple, pad: int, flip: float, crop: float) -> None:
    x = torch.randn(6, *shape, generator=generator(seed)) + 1
    original = x.clone()
    result = FlipCrop(pad, flip, crop)(x, generator(seed))
    assert result.shape == x.shape and result.dtype == x.dtype and torch.equal(x, original)
    for image, out in zip(x, result):
        possible = variants(image, pad)
        is_flipped, dy, dx = possible[out.contiguous().numpy().tobytes()] if out.any() else (flip > 0, pad, pad)
        assert is_flipped == bool(flip) or 0 < flip < 1
        assert crop > 0 or (dy, dx) == (pad, pad)


def places(augment: FlipCrop, n: int = 20_000) -> Counter:
    """Return the frequency of each (flipped, down, right) for an image in which all of them differ."""
    image = torch.arange(1.0, 1 + 12 * 12).reshape(1, 12, 12)
    possible = variants(image, augment.pad)
    result = augment(image.expand(n, 1, 12, 12), generator(3))
    return Counter(possible[out.contiguous().numpy().tobytes()] for out in result)


def test_the_papers_probabilities() -> None:
    n, records = 20_000, places(FlipCrop())
    num_flipped = sum(count for (flip, _, _), count in records.items() if flip)
    still = sum(count for (_, dy, dx), count in records.items() if (dy, dx) == (4, 4))
    assert num_flipped / n == pytest.approx(0.5, abs=0.015)
    assert still / n == pytest.approx(0.5 + 0.5 / 81, abs=0.015)  # no crop, or the crop that is the image itself
    pair = records[True, 4, 4]
    assert pair / n == pytest.approx(0.5 * (0.5 + 0.5 / 81), abs=0.015)  # flip and crop are independent
    for axis in (1, 2):
        moves = Counter()
        for place, count in records.items():
            moves[place[axis]] += count
        for offset in range(9):
            expected = 0.5 / 9 + 0.5 * (offset == 4)
            assert moves[offset] / n == pytest.approx(expected, abs=0.012), (axis, offset)
    crops = places(FlipCrop(crop=1.0))
    assert sum(c for (_, d, r), c in crops.items() if (d, r) == (4, 4)) / n == pytest.approx(1 / 81, abs=0.005)
    assert len(crops) == 2 * 81


def test_the_same_generator_gives_the_same_images_and_goes_on() -> None:
    x = torch.randn(50, 3, 8, 8)
    a, b, c = generator(1), generator(1), generator(2)
    first = FlipCrop()(x, a)
    assert torch.equal(first, FlipCrop()(x, b)) and not torch.equal(first, FlipCrop()(x, c))
    assert not torch.equal(first, FlipCrop()(x, a))
    state = torch.random.get_rng_state()
    FlipCrop()(x, a)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_images_without_channels_and_in_float64() -> None:
    x = torch.randn(9, 8, 8, dtype=torch.float64)
    result = FlipCrop()(x, generator(1))
    assert result.shape == x.shape and torch.equal(result, FlipCrop()(x[:, None], generator(1))[:, 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_images_on_a_gpu() -> None:
    x = torch.randn(500, 3, 32, 32)
    assert torch.equal(FlipCrop()(x.cuda(), generator(1)).cpu(), FlipCrop()(x, generator(1)))


def test_augmentations_by_name() -> None:
    assert (
        augment_by_name("none") is None
        and augment_by_name("auto") is None
        and augment_by_name("auto", "flip_crop") == FlipCrop()
    )
    assert augment_by_name("flip_crop_always") == AUGMENTS["flip_crop_always"] == FlipCrop(crop=1.0)


def test_no_more_than_32_batches_are_augmented_at_once() -> None:
    sizes = []

    def augment(x: torch.Tensor, _: torch.Generator) -> torch.Tensor:
        sizes.append(len(x))
        return x

    client = (torch.randn(71, 4), torch.arange(71) % 2)
    data = fed.FederatedData([client], client, 2, augment=augment)
    fed.run(torch.nn.Linear(4, 2), data, fed.FedAvg(), rounds=1, local_epochs=1, batch_size=2, lr=0.1)
    assert sizes[-2:] == [64, 7]  # after a first trial of two samples
