"""Run directories that were damaged: refused and left as they are, or continued in the same bits; never in others."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastsam import fed
from fastsam.fed.rundir.manifest import RunDirectoryError, read_manifest, read_tensors
from tests.attack.trials import Attack, Trial
from tests.helpers.fed_rundir import records, snapshot, start

BEFORE, AFTER = 2, 3  # rounds that the damaged run has, and is resumed to
BITS = 200  # bits that a trial flips one by one


def _flip(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice([1, 1, 1, 2, 30])):
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def _zeros(data: bytearray, rng: random.Random) -> bytes:
    """Return the data with zeros in one place, as if the disk had lost a block."""
    begin = rng.randrange(len(data) + 1)
    length = min(rng.choice([1, 16, 512, 4096]), len(data) - begin)
    data[begin : begin + length] = bytes(length)
    return bytes(data)


DAMAGES: dict[str, Callable[[bytearray, random.Random], bytes]] = {
    "flipped": _flip,
    "cut": lambda data, rng: bytes(data[: rng.randrange(len(data) + 1)]),
    "longer": lambda data, rng: bytes(data) + rng.randbytes(rng.randint(1, 100)),
    "zeros": _zeros,
    "without a part": lambda data, rng: bytes(data[: (i := rng.randrange(len(data) + 1))] + data[i + rng.randint(1,
        40) :]),
    "something else": lambda data, rng: rng.randbytes(rng.choice([0, 1, 7, 8, 9, 4000])),
}  # fmt: skip


@dataclass(frozen=True)
class FullRun:
    """A run of `BEFORE` rounds, and its result after `AFTER` rounds."""

    directory: Path
    model: bytes
    records: list[dict[str, Any]]

    def equals(self, directory: Path) -> bool:
        """Return True if a run in `directory` ended in the same bits."""
        return (directory / "model.safetensors").read_bytes() == self.model and records(directory) == self.records


def resume(directory: Path, rounds: int = AFTER) -> fed.Result:
    return start(directory, algorithm=fed.SCAFFOLD(), rounds=rounds, resume=True, executor="sequential")


def prepare(folder: Path) -> FullRun:
    resume(folder / "run", BEFORE)
    resume(folder / "whole")
    return FullRun(folder / "run", (folder / "whole" / "model.safetensors").read_bytes(), records(folder / "whole"))


def damage_files(trial: Trial) -> int:
    """Damage, delete or exchange one or two files of a run directory, and resume the run."""
    rng, directory = trial.rng, trial.folder / "run"
    shutil.copytree(trial.common.directory, directory)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    damages = []
    for path in rng.sample(files, rng.choice([1, 1, 2])):
        kind = rng.choice([*DAMAGES, "gone", "another file"])
        damages.append(f"{path.name} {kind}")
        if kind == "gone":
            path.unlink()
        elif kind == "another file":
            path.write_bytes((trial.common.directory / rng.choice(files).relative_to(directory)).read_bytes())
        else:
            path.write_bytes(DAMAGES[kind](bytearray(path.read_bytes()), rng))
    digests = snapshot(directory)
    try:
        resume(directory)
    except RunDirectoryError:
        assert snapshot(directory) == digests, f"refused, and changed: {damages}"
        return 1
    assert trial.common.equals(directory), f"continued in other bits: {damages}"
    return 1


def flip_bits(trial: Trial) -> int:
    """Flip single bits of the manifest and of the files that it names, one after the other over all trials."""
    folder = trial.common.directory / "checkpoint"
    content, copy = read_manifest(folder / "manifest.json"), trial.folder / "damaged"
    files = ["manifest.json", *sorted(content["files"])]
    sizes = [8 * (folder / name).stat().st_size for name in files]
    for number in range(trial.number * BITS, (trial.number + 1) * BITS):
        place = number * 7919 % sum(sizes)  # a prime: neighbours in time are far from each other in the files
        file = 0
        while place >= sizes[file]:
            place, file = place - sizes[file], file + 1
        name = files[file]
        data = bytearray((folder / name).read_bytes())
        data[place // 8] ^= 1 << place % 8
        copy.write_bytes(data)
        try:
            result = read_manifest(copy) if name == files[0] else read_tensors(copy, content["files"][name])
        except RunDirectoryError:
            continue
        assert result == content, f"bit {place} of {name} was flipped, and it was read"
    return BITS


ATTACKS = (
    Attack("damaged-directory", "a damaged run directory is refused and left as it is, or changes no bit", damage_files,
        prepare),
    Attack("flipped-bit", "no flipped bit of a manifest, or of a file that it names, is taken", flip_bits, prepare,
        share=0.3),
)  # fmt: skip
