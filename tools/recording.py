"""Records a terminal of 80 columns as a picture: `make recording`, a minute.

The command of `COMMAND` runs in a pseudo-terminal, in a temporary folder with a copy of its config. The screen at its
end becomes docs/pictures/compare.svg, drawn by rich. Its text stays text, in a font of the reader's machine.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "examples/showcase.toml"
COMMAND = f"fastsam compare {CONFIG} --algorithms fedavg,fedsam,fedsmoo --seeds 0,1,2"
FILE = ROOT / "docs" / "pictures" / "compare.svg"
COLUMNS = 80
FRAME = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, Menlo, Consolas, monospace; }}
{styles}
</style>
<defs>{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#292929"/>
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}<g class="{unique_id}-matrix">
{matrix}
</g></g>
</svg>
"""


def record(command: str, folder: Path) -> bytes:
    """Return all that `command` writes to a terminal, run in `folder`. Raises CalledProcessError if it fails."""
    terminal, side = pty.openpty()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": path, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(shlex.split(command), cwd=folder, env=environment, stdin=side, stdout=side, stderr=side)
    os.close(side)
    output = b""
    with suppress(OSError):  # so Linux tells that the program has closed its side
        while data := os.read(terminal, 65536):
            output += data
    os.close(terminal)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command, output)
    return output


def screen(output: bytes) -> list[str]:
    """Return the lines that stay on the screen. A line that is erased and written again stays in its last state."""
    text = re.sub(r"\x1b\[\?25[lh]", "", output.decode())  # the cursor is hidden and shown
    return [re.split(r"\r|\x1b\[2K", line.rstrip("\r"))[-1].rstrip() for line in text.split("\n")]


def draw(command: str, lines: list[str]) -> str:
    """Return the SVG of a terminal with a command and the lines of its output."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=False)
    return console.export_svg(theme=MONOKAI, code_format=FRAME, unique_id="terminal", font_aspect_ratio=0.61)


def main() -> None:
    """Run the command and write the picture."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / CONFIG).parent.mkdir()
        shutil.copy(ROOT / CONFIG, Path(name) / CONFIG)
        FILE.write_text(draw(COMMAND, screen(record(COMMAND, Path(name).resolve()).rstrip())))


if __name__ == "__main__":
    main()
