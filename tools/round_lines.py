"""Count of the distinct lines of fastsam that a steady round of federated training executes.

    python tools/round_lines.py

With `--list` it also prints them, file by file. A steady round is the fifth of a run with the executor "sequential", a
test set and default options. The first round is left out because it checks what later rounds rely on. Besides lines the
tool counts statements, because a statement may be written in several lines, and the functions and files they are in.
The third row is FedAvg as a subclass that a user writes: the loop checks the values that its methods return.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import fastsam
from fastsam import fed

PACKAGE = Path(fastsam.__file__).parent
PREFIX = f"{PACKAGE}{os.sep}"  # fastsam_kernels may be in the folder next to it
CHECKED = "a user's subclass of FedAvg, its values checked"
STEADY = 4  # number of rounds before the traced round


class OwnFedAvg(fed.FedAvg):
    """FedAvg as a user's subclass, whose returned values are checked."""


class Trace:
    """The lines of the package that one round executes. It is called after every round, as `progress` of `fed.run`."""

    def __init__(self) -> None:
        self.rounds = 0
        self.lines: set[tuple[str, int]] = set()
        self.codes: set[CodeType] = set()

    def __call__(self, record: Mapping[str, Any]) -> None:
        self.rounds += 1
        follow = self._follow if self.rounds == STEADY else None
        sys.settrace(follow)
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # functions that have begun, such as the loop over the rounds
            frame.f_trace = follow if frame.f_code.co_filename.startswith(PREFIX) else None
            frame = frame.f_back

    def _follow(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PREFIX):
            return None
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
            self.codes.add(frame.f_code)
        return self._follow


def statements(lines: set[tuple[str, int]]) -> int:
    """Return the number of innermost statements in which the lines are."""
    statement_lines = set()
    by_file = defaultdict(set)
    for file, line in lines:
        by_file[file].add(line)
    for file, numbers in by_file.items():
        nodes = [node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.stmt)]
        for number in numbers:
            enclosing_statements = [node for node in nodes if node.lineno <= number <= (node.end_lineno or 0)]
            statement_lines.add((file, max(node.lineno for node in enclosing_statements)))
    return len(statement_lines)


def trace(algorithm: fed.Algorithm) -> Trace:
    """Train a small model with `algorithm` and return the trace of its steady round."""
    torch.manual_seed(0)
    clients = [(torch.randn(n, 6), torch.arange(n) % 3) for n in (7, 12, 22, 12, 7, 5, 30, 9)]
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    recorder = Trace()
    options: dict[str, Any] = {"rounds": STEADY + 2, "participation": 0.5, "sampler": "fixed", "batch_size": 5}
    fed.run(model, clients, algorithm, test=clients[0], executor="sequential", progress=recorder, **options)
    return recorder


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the lines that a steady federated round executes.")
    parser.add_argument("--list", action="store_true", help="print the lines of FedAvg's round")
    algorithms = {"FedAvg": fed.FedAvg(), "FedSAM": fed.FedSAM(), CHECKED: OwnFedAvg()}
    traces = {name: trace(algorithm) for name, algorithm in algorithms.items()}
    if parser.parse_args().list:
        for file in sorted({file for file, _ in traces["FedAvg"].lines}):
            numbers = sorted(line for path, line in traces["FedAvg"].lines if path == file)
            text = Path(file).read_text().splitlines()
            print(f"--- {Path(file).relative_to(PACKAGE)} ({len(numbers)})")
            print(*(f"{number:5d} {text[number - 1]}" for number in numbers), sep="\n")
    print(f"{'':{len(CHECKED)}s} lines  statements  functions  files")
    for name, recorder in traces.items():
        files = {file for file, _ in recorder.lines}
        counts = len(recorder.lines), statements(recorder.lines), len(recorder.codes), len(files)
        print("{:{}s} {:5d} {:11d} {:10d} {:6d}".format(name, len(CHECKED), *counts))


if __name__ == "__main__":
    main()
