"""The name under which fastsam is installed, and the commands that install what it needs beyond torch and numpy."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "fused-sam"  # the import is `fastsam`
# By module, the extra that brings it.
EXTRAS = {
    **dict.fromkeys(("matplotlib", "PIL", "rich", "sklearn", "tomli"), "lab"),
    "dp_accounting": "privacy",
    "shtab": "completion",
    "triton": "triton",
}


def install_command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def torchvision_command() -> str:
    """Return the command that installs the torchvision of this torch, and nothing that would replace this torch."""
    # torchvision 0.(n + 15) belongs to torch 2.n.
    minor = int((installed_version("torch") or "2.10").split(".")[1])
    return f"pip install --no-deps 'torchvision==0.{minor + 15}.*' pillow"


def missing_module_hint(module: str | None) -> str | None:
    """Return how to install the package of a missing module, None if no extra brings it."""
    top = (module or "").partition(".")[0]
    return f"{top} is not installed: {install_command(EXTRAS[top])}" if top in EXTRAS else None


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
