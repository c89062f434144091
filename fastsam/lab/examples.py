"""The example configs: in a wheel the folder `configs` next to this module, in a checkout the folder `examples`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastsam.fed.common.atomic_files import make_directory, write_bytes

SHOWCASE = "showcase.toml"
CONFIGS = (SHOWCASE, "digits.toml", "digits_sharpness.toml", "private.toml")  # configs that need no other file
_HERE = Path(__file__).resolve().parent


def path(name: str) -> Path:
    """Return the path of an example config. Raises FileNotFoundError if this installation does not have it."""
    places = [_HERE / "configs" / name, _HERE.parents[1] / "examples" / name]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"the example {name} is missing: {places[0]} does not exist. Install fastsam again")


def copy(folder: Path) -> Iterator[Path]:
    """Write the example configs into `folder` and yield their paths. Raises FileExistsError, and then writes nothing,
    if one of them exists there."""
    targets = {name: folder / name for name in CONFIGS}
    for target in targets.values():
        if target.exists():
            raise FileExistsError(f"{target} exists, and it may have your changes. Choose another folder")
    make_directory(folder, "choose another --copy")
    for name, target in targets.items():
        write_bytes(target, path(name).read_bytes())
        yield target
