"""The Python of README and docs/ runs as the page lets a reader copy it: by itself, or after the page's own first block
or blocks."""

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fastsam import fed
from fastsam_kernels import native
from tests.helpers.pages import AFTER_THE_FIRST, IN_TURN, PAGES, Block, blocks, indented_blocks, says
from tools import generated

MOST_ROUNDS = 2  # rounds of a federated run: the code is tested, not its results
PYTHON = [block for page in PAGES for block in blocks(page) if block.language == "python"]


def cases() -> Iterator[tuple[str, list[Block]]]:
    """Yield the blocks that run together in a new namespace: a block and the blocks that it continues."""
    for page in PAGES:
        block_one, *other_blocks = [block for block in PYTHON if block.page == page] or [None]
        if block_one is None:
            continue
        if says(page, IN_TURN):
            yield page, [block_one, *other_blocks]
            continue
        context = [block_one] if says(page, AFTER_THE_FIRST) else []
        yield str(block_one), [block_one]
        yield from ((str(block), [*context, block]) for block in other_blocks)


CASES = dict(cases())
CLAIMS: dict[str, Callable[[dict[str, Any]], bool]] = {  # results of the blocks of a page
    "docs/tutorial_optimizer.md": lambda names: (
        names["rise"](names["flat"]) < names["rise"](names["plain"])
        and min(names["accuracy"](names[model]) for model in ("plain", "flat", "half", "one_pass")) > 0.9
    ),
}


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten federated runs, and train one client after the other, because a recording takes longer than few
    rounds."""
    run = fed.run

    def run_shortened(*arguments: Any, rounds: int, **options: Any) -> fed.Result:
        return run(*arguments, rounds=min(rounds, MOST_ROUNDS), **({"executor": "sequential"} | options))

    monkeypatch.setattr(fed, "run", run_shortened)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[Any]:
    """A function that begins one, for blocks that say "in a process group"."""
    begin = partial(dist.init_process_group, "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def missing_modules(code: str) -> list[str]:
    """Modules that it imports and that are not installed."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return sorted({top for name in names if importlib.util.find_spec(top := name.partition(".")[0]) is None})


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
def test_its_python_runs(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_group: Any) -> None:
    *context, block_of_case = CASES[case]
    ast.parse(block_of_case.code)
    if block_of_case.left_out:
        pytest.skip(f"{block_of_case}: {block_of_case.left_out}")
    if modules := missing_modules(block_of_case.code):
        names = ", ".join(modules)
        pytest.skip(f"{block_of_case} needs {names}, which is not installed (make test-integrations has the trainers)")
    if "torch.ops.fastsam" in block_of_case.code and (reason := native.why_not("cpu")):
        pytest.skip(f"{block_of_case} calls compiled ops: {reason}")
    monkeypatch.chdir(tmp_path)
    if "in a process group" in block_of_case.code:
        process_group()
    result: dict[str, Any] = {"__name__": "page"}
    for block in (*context, block_of_case):
        block.run(result)
    assert case not in CLAIMS or CLAIMS[case](result)


def test_every_block_of_a_page_in_turn_can_run() -> None:
    for page in PAGES:
        if says(page, IN_TURN):
            page_blocks = [block for block in PYTHON if block.page == page]
            assert not [str(block) for block in page_blocks if block.left_out or missing_modules(block.code)], (
                "what follows cannot run"
            )


def test_quoted_code_is_the_package_s() -> None:
    pages = generated.pages()
    assert {path.name for path in pages} >= {"cli.md", "own_algorithm.md"}
    differences = [path.name for path, text in pages.items() if generated.page(text) != text]
    assert not differences, f"{differences} quote old code; write it again: python -m tools.generated"


def test_python_is_fenced() -> None:
    """Code that is only indented would not be tested."""
    python = re.compile(r"(def|class|import|from) \S|@\w+$|(fed|opt|fastsam)\.\w+\(")
    assert not [(page, line) for page in PAGES for line in indented_blocks(page) if python.match(line)]
