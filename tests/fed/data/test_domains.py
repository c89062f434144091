"""Domains: one left out, clients inside each, image folders, and the digits under rotation and noise."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fastsam.fed import models
from fastsam.fed.data import by_domain, digits_domains, domainnet, folders, officehome
from fastsam.fed.data.handwritten import load
from tests.helpers.small_archives import SMALL, torchvision, write_folders


def pairs(sizes: dict[str, int]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """x tells domain and position."""
    return {
        name: (torch.stack([torch.full((n,), float(k)), torch.arange(float(n))], 1), torch.arange(n) % 3)
        for k, (name, n) in enumerate(sizes.items())
    }


def test_one_domain_is_left_out_and_each_other_is_a_client() -> None:
    data = by_domain(pairs({"a": 9, "b": 12, "c": 6}), "b")
    assert (list(data.domains), data.held_out, data.classes) == (["a", "c"], "b", 3)
    assert [x[:, 0].unique().tolist() for x, _ in data] == [[0.0], [2.0]]
    assert data.test[0][:, 0].unique().tolist() == [1.0] and len(data.test[1]) == 12
    assert data.priors.tolist() == [[1 / 3] * 3] * 2


def test_several_clients_share_a_domain() -> None:
    data = by_domain(pairs({"a": 10, "b": 12, "c": 7}), "c", clients_per_domain=3)
    assert list(data.domains) == ["a"] * 3 + ["b"] * 3
    assert [len(y) for _, y in data] == [4, 3, 3, 4, 4, 4]
    for first, n in ((0, 10), (3, 12)):
        positions = torch.cat([data[i][0][:, 1] for i in range(first, first + 3)])
        assert sorted(positions.tolist()) == list(range(n)) and positions.tolist() != list(range(n))
    repeat = by_domain(pairs({"a": 10, "b": 12, "c": 7}), "c", clients_per_domain=3, seed=5)
    assert not torch.equal(data[0][0], repeat[0][0])


def test_without_a_held_out_domain_each_gives_a_part_to_the_test_set() -> None:
    data = by_domain(pairs({"a": 30, "b": 60}), test_fraction=0.2)
    assert [len(y) for _, y in data] == [24, 48] and data.held_out is None
    assert torch.bincount(data.test[0][:, 0].long()).tolist() == [6, 12]
    all_x = torch.cat([data.test[0], *[x for x, _ in data]])
    assert len(all_x.unique(dim=0)) == 90


def test_digits_domains_share_no_image_and_keep_the_classes() -> None:
    domains = [f"rot{90 * k}" for k in range(4)]
    data = digits_domains(domains, "rot0")
    x, y = load()
    plain = {row.numpy().tobytes(): int(label) for row, label in zip(x, y)}
    records: list[bytes] = []
    for k, (dx, dy) in enumerate([data.test, *data]):
        step_back = torch.rot90(dx, -k, (2, 3)).contiguous()
        records += [row.numpy().tobytes() for row in step_back]
        assert [plain[row.numpy().tobytes()] for row in step_back] == dy.tolist()
        assert (torch.bincount(dy, minlength=10) - torch.bincount(y) / 4).abs().max() < 2
    assert len(records) == len(y) and len(set(records)) == len(plain)
    assert list(data.domains) == domains[1:] and data.name == "digits-domains"


def test_digits_transforms() -> None:
    plain, quarter, almost_plain, noisy, pair = (
        digits_domains([name, "rot180"]).clients[0][0]
        for name in ("rot0", "rot90", "rot90.001", "noise0.5", "rot90+noise0.5")
    )
    assert torch.equal(quarter, torch.rot90(plain, 1, (2, 3)))
    assert torch.allclose(almost_plain, quarter, atol=1e-3)  # the same sense, the same centre
    assert (noisy - plain).std().item() == pytest.approx(0.5, rel=0.02)
    assert (pair - quarter).std().item() == pytest.approx(0.5, rel=0.02)
    assert torch.equal(noisy, digits_domains(["noise0.5", "rot180"]).clients[0][0])


def test_image_folders_of_a_data_set_with_domains(tmp_path: Path) -> None:
    write_folders(tmp_path / "OfficeHomeDataset_10072016")
    data = officehome(tmp_path, "Real World", folder_set=SMALL, size=28)
    assert (list(data.domains), data.classes, data.in_shape) == (["Art", "Clipart", "Product"], 3, (3, 28, 28))
    assert data.pixels == folders.STATISTICS and data.test[0].dtype == torch.uint8
    assert data[0][1].tolist() == [0, 1, 1, 2, 2]
    path = tmp_path / "OfficeHomeDataset_10072016" / "Art" / "class_1" / "1.jpg"
    picture = Image.open(path).convert("RGB").resize((64, 32), Image.Resampling.BILINEAR).crop((18, 2, 46, 30))
    assert torch.equal(data[0][0][2], torch.from_numpy(np.asarray(picture).transpose(2, 0, 1).copy()))


def test_domains_keep_their_order_and_share_the_labels(tmp_path: Path) -> None:
    """A class has the same label in each domain that has images of it, and none without images."""
    torchvision()
    colours = {"second/dog": 10, "second/cat": 20, "first/dog": 30, "first/ant": 40}
    for name, colour in colours.items():
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (10, 10), (colour, 0, 0)).save(tmp_path / name / "0.png")
    (tmp_path / "first" / "zebra").mkdir()
    pairs, classes = folders.read_domains(tmp_path, ["second", "first"], 8)
    assert list(pairs) == ["second", "first"] and classes == ["ant", "cat", "dog"]
    for domain, (x, y) in pairs.items():
        labels = {f"{domain}/{classes[label]}": int(image[0].unique()) for image, label in zip(x, y)}
        assert labels == {name: colour for name, colour in colours.items() if name.startswith(domain)}
    with pytest.raises(FileNotFoundError, match="no folder of the domain 'third'; it has 'first', 'second'$"):
        folders.read_domains(tmp_path, ["second", "third"], 8)


def test_the_cache_is_used_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "officehome"
    write_folders(root)
    first = officehome(tmp_path, folder_set=SMALL, size=16)
    read_paths: list[Path] = []
    image = folders._image
    monkeypatch.setattr(folders, "_image", lambda path, size: (read_paths.append(path), image(path, size))[1])
    second = officehome(tmp_path, folder_set=SMALL, size=16)
    assert not read_paths and torch.equal(first.test[0], second.test[0])
    changes = root / "Art" / "class_0" / "0.jpg"
    Image.new("RGB", (20, 20), (255, 0, 0)).save(changes)
    third = officehome(tmp_path, "Clipart", folder_set=SMALL, size=16)
    assert {path.parent.parent.name for path in read_paths} == {"Art"}
    assert third[0][0][0].float().mean((1, 2))[0] > 250
    (root / ".fastsam-16" / "Art.json").unlink()  # as if it had been interrupted
    assert torch.equal(officehome(tmp_path, "Clipart", folder_set=SMALL, size=16)[0][0], third[0][0])


def test_bad_image_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no OfficeHome in .*officehome/Art/<class>/<image>"):
        officehome(tmp_path)
    root = tmp_path / "officehome"
    write_folders(root, ("Art", "clipart", "real_world"))
    with pytest.raises(FileNotFoundError, match="no folder of .* 'Product'; it has 'Art', 'clipart', 'real_world'"):
        officehome(tmp_path, folder_set=SMALL)
    (root / "Product").mkdir()
    with pytest.raises(ValueError, match="Product has no images"):
        officehome(tmp_path, folder_set=SMALL)
    write_folders(tmp_path / "more", ("x",))
    os.rmdir(root / "Product")
    (tmp_path / "more" / "x").rename(root / "Product")
    with pytest.raises(ValueError, match="has 3 classes .*, OfficeHome has 65"):
        officehome(tmp_path, size=16)
    with pytest.raises(ValueError, match="no domain 'Painting'; its domains are 'Art', 'Clipart'"):
        officehome(tmp_path, "Painting", folder_set=SMALL, size=16)
    with pytest.raises(ValueError, match="size must be an integer >= 8"):
        officehome(tmp_path, folder_set=SMALL, size=4)
    cut_file = root / "Product" / "class_2" / "1.jpg"
    cut_file.write_bytes(cut_file.read_bytes()[:300])
    with pytest.raises(ValueError, match="1.jpg is not a complete image"):
        officehome(tmp_path, folder_set=SMALL, size=16)
    assert not list(root.glob(".fastsam-16/*.part")) and not (root / ".fastsam-16" / "Product.json").exists()
    with pytest.raises(FileNotFoundError, match="no DomainNet"):
        domainnet(tmp_path)


def test_the_model_sees_normalised_pixels() -> None:
    x = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    inner = models.build("mlp", (3, 8, 8), 4, 0).double()
    mean, std = folders.STATISTICS
    constants = (torch.tensor(values, dtype=torch.float64).reshape(3, 1, 1) for values in (mean, std))
    normalised_pixels = torch.sub(x.double() / 255, next(constants)) / next(constants)
    pixel_model = models.Pixels(inner, mean, std)
    torch.testing.assert_close(pixel_model(x), inner(normalised_pixels))
    torch.testing.assert_close(
        pixel_model(normalised_pixels), inner(normalised_pixels)
    )  # floating-point inputs are normalised already
    assert not list(pixel_model.buffers()) and pixel_model.float()(x).dtype == torch.float32
