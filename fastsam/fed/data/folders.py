"""OfficeHome, DomainNet and other image folders by domain: read once, cropped to one size, kept as bytes in files
mapped into memory.

torchvision lists the folders, reads the images and crops them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastsam.fed.common.atomic_files import make_directory
from fastsam.fed.common.checks import integer
from fastsam.fed.common.import_paths import vision
from fastsam.fed.data import augment as augmentation
from fastsam.fed.data.domains import Pair, by_domain
from fastsam.fed.data.federated import FederatedData

# ImageNet's, of the three channels in 0..1.
STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_PURPOSE = "a data set of image folders"


@dataclass(frozen=True)
class FolderSet:
    """A published data set of image folders ``<folder>/<domain>/<class>/<image>``.

    Attributes:
        folders: possible names of the directory.
        source: address of the published files.
    """

    name: str
    folders: tuple[str, ...]
    domains: tuple[str, ...]
    classes: int
    source: str


OFFICEHOME = FolderSet(
    "OfficeHome",
    ("officehome", "OfficeHome", "OfficeHomeDataset_10072016"),
    ("Art", "Clipart", "Product", "Real World"),
    65,
    "https://www.hemanthdv.org/officeHomeDataset.html",
)
DOMAINNET = FolderSet(
    "DomainNet",
    ("domainnet", "DomainNet", "domain_net"),
    ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    345,
    "https://ai.bu.edu/M3SDA/",
)


def officehome(
    data_dir: str | Path = "data",
    held_out: str | None = None,
    clients_per_domain: int = 1,
    seed: int = 20,
    test_fraction: float = 0.2,
    augment: str = "auto",
    size: int = 224,
    folder_set: FolderSet = OFFICEHOME,
) -> FederatedData:
    """Return OfficeHome (Venkateswara et al., 2017): 15,588 images, 65 classes, domains Art, Clipart, Product and Real
    World.

    x are bytes, uint8 [n, 3, size, size]: the shorter side resized to ``size * 256 / 224``, the centre cropped.
    `FederatedData.pixels` has ImageNet's mean and standard deviation. The first call reads the images and writes
    ``.fastsam-<size>`` next to the domains. Later calls map it into memory.

    Args:
        data_dir: folder with the domains, or its parent, as the published zip file unpacks.
        held_out, clients_per_domain, seed, test_fraction: see `by_domain`.
        augment: a name of `fastsam.fed.data.augment.AUGMENTS`; "auto" means no augmentation.
        size: height and width of the images.
        folder_set: the published data set.

    Raises:
        ImportError: torchvision is missing.
        FileNotFoundError: a folder or domain is missing.
        ValueError: the number of classes is different, or an image cannot be read.
    """
    root = _root(folder_set, Path(data_dir))
    pairs, classes = read_domains(root, folder_set.domains, size)
    if len(classes) != folder_set.classes:
        raise ValueError(
            f"{root} has {len(classes)} classes (folders in the domains' folders), {folder_set.name} has "
            f"{folder_set.classes}"
        )
    return by_domain(
        pairs,
        held_out,
        clients_per_domain,
        seed,
        test_fraction,
        classes=len(classes),
        name=folder_set.name,
        augment=augmentation.augment_by_name(augment),
        pixels=STATISTICS,
    )


def domainnet(
    data_dir: str | Path = "data",
    held_out: str | None = None,
    clients_per_domain: int = 1,
    seed: int = 20,
    test_fraction: float = 0.2,
    augment: str = "auto",
    size: int = 224,
    folder_set: FolderSet = DOMAINNET,
) -> FederatedData:
    """Return DomainNet (Peng et al., 2019): 586,575 images, 345 classes, 6 domains, 88 GB; otherwise as
    `officehome`."""
    return officehome(data_dir, held_out, clients_per_domain, seed, test_fraction, augment, size, folder_set)


def _root(folder_set: FolderSet, data_dir: Path) -> Path:
    """Return the directory of the domains: `data_dir`, or a folder of the data set's name in it."""
    for place in (data_dir, *(data_dir / name for name in folder_set.folders)):
        if place.is_dir() and any(_find_domain(place, domain) for domain in folder_set.domains):
            return place
    raise FileNotFoundError(
        f"no {folder_set.name} in {data_dir.resolve()}; unpack it there (from {folder_set.source}), so that there is "
        f"{folder_set.folders[0]}/{folder_set.domains[0]}/<class>/<image>, or name its directory with data_dir"
    )


def _find_domain(root: Path, domain: str) -> Path | None:
    """Return the domain's folder. Case, blanks and underscores do not count ("Real World", "real_world")."""
    plain = re.sub(r"[\W_]", "", domain).lower()
    return next(
        (p for p in sorted(root.iterdir()) if p.is_dir() and re.sub(r"[\W_]", "", p.name).lower() == plain), None
    )


def read_domains(root: Path, domains: Sequence[str], size: int = 224) -> tuple[dict[str, Pair], list[str]]:
    """Return the images ``root/<domain>/<class>/<image>`` of the named domains, and the names of all classes, sorted.

    The values are x uint8 [n, 3, size, size], a memory-mapped file, and y int64 [n].

    Raises:
        FileNotFoundError: a domain has no folder.
        ValueError: a domain has no images, a file is not a complete image, or `size` is below 8.
    """
    integer("size", size, at_least=8)
    folders = {domain: _find_domain(root, domain) for domain in domains}
    absent = [domain for domain, path in folders.items() if path is None]
    if absent:
        content = ", ".join(repr(p.name) for p in sorted(root.iterdir()) if p.is_dir() and not p.name.startswith("."))
        raise FileNotFoundError(f"{root} has no folder of the domain {absent[0]!r}; it has {content or 'none'}")
    samples = {domain: _samples(path) for domain, path in folders.items() if path is not None}
    classes = sorted({name for images in samples.values() for name, _ in images})
    number = {name: i for i, name in enumerate(classes)}
    pairs = {}
    for domain, images in samples.items():
        cache = root / f".fastsam-{size}" / re.sub(r"\W", "_", domain)
        y = torch.tensor([number[name] for name, _ in images])
        pairs[domain] = (torch.from_numpy(_pixels([path for _, path in images], size, cache)), y)
    return pairs, classes


def _samples(domain: Path) -> list[tuple[str, Path]]:
    """Return class and file of each image, in the order of torchvision's `ImageFolder`, without empty classes."""
    library = vision("torchvision.datasets", _PURPOSE)
    try:
        images = library.ImageFolder(domain, allow_empty=True)
        samples = [(images.classes[label], Path(path)) for path, label in images.samples]
    except FileNotFoundError:  # not a single folder
        samples = []
    if not samples:
        endings = ", ".join(library.folder.IMG_EXTENSIONS)
        raise ValueError(f"{domain} has no images (<class>/<image> with the ending {endings})")
    return samples


def _pixels(files: list[Path], size: int, cache: Path) -> np.ndarray:
    """Return the images, uint8 [n, 3, size, size], from `cache` if it was made of the same files (names, sizes,
    times)."""
    file_facts = [
        (p.relative_to(cache.parent.parent).as_posix(), p.stat().st_size, p.stat().st_mtime_ns) for p in files
    ]
    made_of = hashlib.sha256(json.dumps(file_facts).encode()).hexdigest()
    array, stamp = cache.with_suffix(".npy"), cache.with_suffix(".json")
    shape = (len(files), 3, size, size)
    if not (stamp.is_file() and array.is_file() and json.loads(stamp.read_text()) == made_of):
        make_directory(cache.parent, "the resized images are kept there: link the folders into another data_dir")
        stamp.unlink(missing_ok=True)
        part = array.with_suffix(f".{os.getpid()}.part")  # another process may be at it too
        try:
            pixels = np.lib.format.open_memmap(part, "w+", np.uint8, shape)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for i, image in enumerate(pool.map(lambda path: _image(path, size), files)):
                    pixels[i] = image
            pixels.flush()
            part.replace(array)
        finally:
            part.unlink(missing_ok=True)
        stamp.write_text(json.dumps(made_of))  # last: a cache without it is made again
    return np.load(array, mmap_mode="c")  # copy on write: torch wants memory that could be written


def _image(path: Path, size: int) -> Any:
    """Read an image, resize its shorter side to ``size * 256 / 224`` (bilinear), and return the centre, [3, size, size]
    uint8."""
    folder = vision("torchvision.datasets.folder", _PURPOSE)
    transforms = vision("torchvision.transforms.functional", _PURPOSE)
    try:
        picture = folder.default_loader(path)
    except (OSError, SyntaxError, ValueError) as error:  # errors of Pillow for cut files and other content
        raise ValueError(f"{path} is not a complete image: {error}") from error
    picture = transforms.center_crop(transforms.resize(picture, round(size * 256 / 224)), [size, size])
    return transforms.pil_to_tensor(picture).numpy()
