"""The writer of all tables and pages: `python -m bench.report FILE...` prints the tables of results files.

Files of one kind are joined, as the calls of `make gpu` leave them. `--plot FOLDER` draws the plots. `--tables
FOLDER` writes every table as .csv and .tex; without a FILE, the tables of bench/results. `--publish` stores the
records in bench/results, draws their plots there, and writes every page from that folder: the texts between
`<!-- bench:NAME -->` and `<!-- /bench -->`. Pages have short tables (bench/joint.py). Nothing here measures.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import ROOT, joint, language, plots, readme
from bench import record as records
from bench.contenders import VARIANTS
from bench.evidence_tables import BASELINES, CURVES
from bench.evidence_tables import tables as evidence_tables
from bench.joint import NONE, TWO_DIGITS, Show, digits
from bench.ncu import METRICS
from bench.record import RESULTS, Record, Row, figure, has_failed, median
from fastsam.lab.report.table import Table

LAYOUTS = ("scattered", "flat")


# --- cells ---


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


@dataclass(frozen=True)
class Column:
    """A column of a case's table, which is left out if no row has the figure. With `quartiles` a second one follows."""

    head: str
    path: str
    show: Show = TWO_DIGITS
    quartiles: bool = False

    def heads(self) -> list[str]:
        return [self.head, "quartiles"] if self.quartiles else [self.head]

    def cells(self, row: Row) -> list[str]:
        stats, value = figure(row, self.path), median(row, self.path)
        if value is None:
            return [NONE, NONE] if self.quartiles else [""]
        return [self.show(value), *([f"{self.show(stats['q1'])}–{self.show(stats['q3'])}"] if self.quartiles else [])]


STEPS = (
    Column("time, SAM = 1", "eager.to.SAM", quartiles=True),
    Column("time, copied SAM = 1", "eager.to.copied"), Column("time, flat = 1", "eager.to.flat"),
    Column("time, foreach = 1", "eager.to.foreach"), Column("time, torch.compile = 1", "eager.to.compiled"),
    Column("time", "eager.seconds", duration), Column("bytes", "floor_bytes", digits(0)),
    Column("of the floor", "eager.fraction"), Column("replayed", "replayed.seconds", duration),
    Column("replayed, of the floor", "replayed.fraction"), Column("replayed, foreach = 1", "replayed.to.foreach"),
    Column("replayed, torch.compile = 1", "replayed.to.compiled"), Column("launches", "launches", str),
    Column("host", "host_seconds.unchanged", duration),
    Column("host, gradients elsewhere every time", "host_seconds.changed", duration),
    Column("kernels", "kernels", digits(1)), Column("calls of torch", "torch_calls", digits(1)),
    Column("extra bytes per parameter", "extra_bytes_per_parameter", digits(1)),
    Column("pytorch-optimizer's, ours = 1", "peer.to.ours", digits(1)),
)  # fmt: skip
SPEED = Column("rounds per second, relative", "speed", quartiles=True)
RACE = (
    SPEED, Column("peak memory", "peak_mib", "{:.0f} MiB".format), Column("cores", "cores", str),
    Column("processors in use", "processors"),
)  # fmt: skip
COLUMNS: dict[str, Sequence[Column]] = {
    **dict.fromkeys(("step", "steps", "whole", "variants", "ops"), STEPS),
    **dict.fromkeys(("speed-1", "speed-2", "growth", "ranks"), RACE),
    "bert": (*RACE, Column("seconds of a round", "seconds"), Column("CPU seconds, first round", "first")),
    "overhead": (
        Column("seconds of a local step, FedAvg = 1", "step", digits(3), quartiles=True),
        Column("of a round", "round", digits(3), quartiles=True),
    ),
    "share": (Column("of a round", "own_share", "{:.1%}".format), Column("seconds a round", "seconds", digits(3))),
    "gpu": (Column("ms a round", "seconds", digits(1, 1e3)), Column("first round, s", "first", digits(1))),
    **dict.fromkeys(
        [*BASELINES, *CURVES],
        (
            Column("chosen", "chosen", str), Column("steps or rounds", "steps.steps", str),
            Column("accuracy", "steps.mean", digits(1, 100)), Column("standard deviation", "steps.std", digits(1, 100)),
            Column("hours", "hours", digits(2)),
        ),
    ),
    "language": tuple(Column(head, f"mean.{key}", digits(3)) for key, head in language.LOSSES.items()),
    "ncu": (Column("duration", "duration", str), *(Column(name, f"metrics.{name}", str) for name in METRICS.values())),
}  # fmt: skip


# --- tables ---


def case_table(case: Record) -> Table:
    """Return a row per contender, with the columns of the case's part."""
    rows = visible_rows(case)
    columns = [c for c in COLUMNS.get(case["part"], ()) if any(median(row, c.path) is not None for row in rows)]
    heads = [head for column in columns for head in column.heads()] or ["result"]
    cells = []
    for row in rows:
        title = row.get("title", row["name"])
        bold = "**" if row.get("ours") and case["part"] in ("step", "steps", "whole") else ""
        texts = [text for column in columns for text in column.cells(row)]
        texts = ["failed" if row.get("problem") else NONE] * len(heads) if has_failed(row) else texts
        cells.append([f"{bold}{title}{bold}", *texts])
    return Table(case["title"], ["", *heads], cells, alignment="l" + "".join("rl"[h == "quartiles"] for h in heads))


def visible_rows(case: Record) -> Sequence[Row]:
    """Return the rows to show, without contenders that were removed since; a variant's row has its peer's row in it."""
    if case["part"] == "gpu":  # an executor has a row per place on the axis
        return [{**row, "title": row["name"]} for row in case["rows"]]
    if case["part"] != "variants":
        return list(case["rows"])
    by_name = {row["name"]: row for row in case["rows"]}
    peers = {name: by_name.get(f"{name}, pytorch-optimizer", {}).get("eager", {}) for name in VARIANTS}
    return [row | {"peer": peers[name]} for name, row in by_name.items() if name in VARIANTS]


def heading(case: Record) -> str:
    """Return the title of a case with its facts."""
    facts = [f"{case['tensors']} tensors, {case['parameters']:,} parameters"] if "tensors" in case else []
    facts += [f"{case['train']} training samples"] if "train" in case else []
    facts += [f"{case['steps']} steps"] if "train" in case and "steps" in case else []
    facts += [f"{case['rounds']} rounds"] if "rounds" in case else []
    facts += [f"copy at {case['copy']['median'] / 1e9:.1f} GB/s"] if "copy" in case else []
    facts += [f"{case['busy']:.2f} processors busy"] if "busy" in case else []
    title = f"{case['op']}, {case['layout']}, {case['title']}" if case["part"] == "ops" else case["title"]
    return f"{title}{': ' * bool(facts)}{'; '.join(facts)}"


def case_text(case: Record) -> str:
    """Return a case for the terminal."""
    return "\n".join(["", heading(case), "", case_table(case).text(), *reasons([case])])


def reasons(cases: Sequence[Record]) -> list[str]:
    """Return why rows have no figures, and the notes to figures, a line each."""
    failures = [row for case in cases for row in case["rows"] if has_failed(row)]
    sentences = (f"Not measured: {r.get('title', r['name'])}: {r.get('problem') or r['absent']}." for r in failures)
    return list(dict.fromkeys([*sentences, *notes(cases)]))


def notes(cases: Sequence[Record]) -> list[str]:
    """Return the notes to figures, a line each."""
    return [
        f"{case['title']}, {row['name']}: {row['note']}." for case in cases for row in case["rows"] if "note" in row
    ]


def _cases(record: Record) -> Iterator[str]:
    for case in record["cases"]:
        yield f"**{heading(case)}**\n\n{case_table(case).markdown()}"
    if records.name_of(record) == "federated":
        yield "![how the time of a round grows](../bench/results/federated.png)"


def _kernels(record: Record) -> Iterator[str]:
    for layout in LAYOUTS:
        yield _ops([case for case in record["cases"] if case.get("layout") == layout], layout)
    yield from _cases({**record, "cases": [case for case in record["cases"] if case["part"] == "steps"]})


def _ops(cases: Sequence[Record], layout: str, times: bool = True) -> str:
    """Return the fraction of the floor per op, backend and size. Without `times` of a call, of one backend."""
    if not cases:
        return f"No op was measured on {layout} tensors."
    sizes = {case["size"]: case["title"] for case in cases}
    names = dict.fromkeys(row["name"] for case in cases for row in case["rows"] if not has_failed(row))
    by_key = {(case["op"], case["size"], row["name"]): row for case in cases for row in case["rows"]}

    def cell(row: Row) -> str:
        figures = row.get("replayed") or row.get("eager")
        time = f" ({duration(median(figures, 'seconds'))})" if figures and times else ""
        return f"{median(figures, 'fraction'):.2f}{time}" if figures else "-"

    rows = []
    for op, bytes_ in {case["op"]: case["bytes_per_parameter"] for case in cases}.items():
        for name in names:
            cells = [cell(by_key.get((op, size, name), {})) for size in sizes]
            if set(cells) != {"-"}:
                rows.append([op, str(bytes_), *[name] * times, *cells])
    heads = ["op", "bytes", *["backend"] * times, *sizes.values()]
    table = Table("", heads, rows, alignment="lrl"[: 2 + times] + "r" * len(sizes))
    facts = f"{'with the time per call, ' * times}median (one thread, or replayed on a GPU)"
    return f"Fraction of the floor on {layout} tensors, {facts}:\n\n{table.markdown()}"


def _evidence(record: Record) -> Iterator[str]:
    yield from evidence_tables(record["cases"])
    yield from _cases(record)


PAGES: dict[str, Callable[[Record], Iterator[str]]] = {"kernels": _kernels, "evidence": _evidence}


def markdown(record: Record) -> str:
    """Return all tables of a record, and how it was made."""
    return "\n\n".join([*PAGES.get(records.name_of(record).partition("-")[0], _cases)(record), made_by(record)])


def short(record: Record) -> str:
    """Return the short tables of a record for its page, and how it was made."""
    name = records.name_of(record).partition("-")[0]
    cases = [{**case, "rows": visible_rows(case)} for case in record["cases"]]
    if name == "evidence":
        parts = list(evidence_tables(cases))
    elif name == "language":
        parts = [language.table(case).markdown() for case in cases]
    elif name == "ncu":
        parts = list(_cases(record))
    elif name == "kernels":
        ops = [{**case, "rows": [row for row in case["rows"] if row["name"] == "native"]} for case in cases]
        ops = [case for case in ops if case.get("layout") == "scattered" and not case["size"].startswith("cut")]
        whole = [
            {**case, "rows": [row for row in case["rows"] if row["name"] != "fastsam_reference"]}
            for case in cases
            if case["part"] == "steps" and case["name"] not in ("cut10", "cut400")
        ]
        parts = [_ops(ops, "scattered", False), *joint.tables(whole)]
    else:
        parts = list(joint.tables(cases))
    return "\n\n".join([*parts, made_by(record, brief=True)])


def made_by(record: Record, brief: bool = False) -> str:
    """Return the origin of a record, the notes to its figures, and the reasons of rows without figures.

    With `brief` there are fewer facts: no options of commands, and nothing about figures that are not there.
    """
    e, m, v = record["environment"], record["environment"]["machine"], record["environment"]["versions"]
    caches = ", ".join(f"{level} {size}" for level, size in m.get("caches", {}).items())
    caches_note = "" if brief else f" ({caches}), {m['memory_gib']} GiB"
    device = ", ".join(m.get("gpus", [])[:1]) or f"{m['cpu']}, {m['cores']} cores{caches_note}"
    names = [
        name for name in ("torch", "triton", "pytorch-optimizer") if v.get(name, NONE) != "not installed" or not brief
    ]
    versions = ", ".join(f"{name} {v[name]}" for name in names if name in v)
    command = e["command"].partition(" --")[0] if brief else e["command"]
    text = f"Made by `{command}` on {e['date'][:10]}, commit `{commit(e)}`; {device}; "
    text += f"Python {v['python']}, {versions}."
    if additions := [f"`{one['command']}` (commit `{commit(one)}`)" for one in record["added"]]:
        last = f"{len(additions)} later commands, the last on {record['added'][-1]['date'][:10]}, commit "
        last += f"`{commit(record['added'][-1])}`"
        text += f" Added to by {last if brief else ', '.join(additions)}."
    lines = [text, *(notes if brief else reasons)(record["cases"])]
    if record["left_out"] and not brief:
        lines.append(f"Cases for which no time was left: {len(record['left_out'])}.")
    return "\n".join(lines)


def commit(e: Record) -> str:
    """Return twelve digits of a commit, with "+changes" if the sources differed from it."""
    return e["commit"][:12] + ("+changes" if e["commit"].endswith("+changes") else "")


# --- tables as files ---

_TABLE = re.compile(r"((?:^\|.*\|\n?)+)", re.MULTILINE)
_CELL = re.compile(r"(?<!\\)\|")  # the bar between two cells


def tables_in(text: str) -> list[Table]:
    """Return the tables of a text in Markdown, without its markup. The title is the line of text above a table."""
    tables, title = [], ""
    for number, part in enumerate(_TABLE.split(text)):
        if number % 2 == 0:
            title = ([_plain(line) for line in part.splitlines() if line.strip()] or [title])[-1]
            continue
        head, marks, *rows = ([_plain(cell) for cell in _CELL.split(line)[1:-1]] for line in part.splitlines())
        tables.append(Table(title, head, rows, alignment="".join("rl"[not mark.endswith(":")] for mark in marks)))
    return tables


def _plain(cell: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("\\|", "|").replace("&lt;", "<")
    return text.replace("**", "").replace("`", "").strip()


def write_tables(record: Record, folder: Path) -> None:
    """Write each table of a record as `NAME-NUMBER.csv` and `.tex`, with its title as a comment of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, table in enumerate(tables_in(markdown(record)), 1):
        path = folder / f"{records.name_of(record)}-{number:02d}"
        path.with_suffix(".csv").write_text(table.csv())
        path.with_suffix(".tex").write_text(f"% {table.title}\n{table.tex()}")


# --- pages ---

_PLACE = re.compile(r"(<!-- (\w+):(\S+(?: \w+)*) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


_PICTURE = re.compile(r"!\[[^\]]*\]\(\S*bench/results/([\w-]+\.png)\)")
README_PLACE = "bench:readme"


def fill(text: str, pieces: Mapping[str, str]) -> str:
    """Return a page with the text in its places replaced by the pieces of that name; other places stay."""

    def piece(match: re.Match[str]) -> str:
        new = pieces.get(f"{match[2]}:{match[3]}")
        return match[0] if new is None else f"{match[1]}{new}\n{match[4]}"

    return _PLACE.sub(piece, text)


def places(text: str) -> list[str]:
    """Return the names of a page's places."""
    return [f"{match[2]}:{match[3]}" for match in _PLACE.finditer(text)]


def published() -> list[Path]:
    """Return the files of the stored records."""
    names = [name for kind in records.KINDS for name in (kind, f"{kind}-cuda")]
    return [path for name in names if (path := RESULTS / f"{name}.json").exists()]


def pages() -> dict[Path, str]:
    """Return every page as bench/results would have it."""
    texts = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
    pieces = {f"bench:{path.stem}": short(records.read(path)) for path in published()}
    if any(README_PLACE in places(text) for text in texts.values()):
        pieces[README_PLACE] = readme.text(RESULTS)
    return {path: fill(text, pieces) for path, text in texts.items() if places(text)}


def shown_pictures() -> set[str]:
    """Return the names of the pictures of bench/results that pages show."""
    return {name for path in (ROOT / "docs").glob("*.md") for name in _PICTURE.findall(path.read_text())}


def check_parts(new_records: Mapping[str, Record]) -> None:
    """Raise ValueError if a record to publish lacks a part of the stored record, which it would replace."""
    for name, record in new_records.items():
        path = RESULTS / f"{name}.json"
        old_cases = records.read(path)["cases"] if path.exists() else []
        missing_parts = {case["part"] for case in old_cases} - {case["part"] for case in record["cases"]}
        if missing_parts:
            raise ValueError(
                f"{name} has no cases of {', '.join(sorted(missing_parts))}, which the stored file has. Give "
                f"bench/results/{name}.json before the new file: the two are joined"
            )


def main(argv: Sequence[str] | None = None) -> int:
    facts = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=facts, allow_abbrev=False)
    parser.add_argument("results", type=Path, nargs="*", help="results files of any benchmark")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the plots there")
    parser.add_argument("--tables", type=Path, metavar="FOLDER", help="write each table as .csv and .tex there")
    parser.add_argument("--publish", action="store_true", help="store the records in bench/results and write the pages")
    arguments = parser.parse_args(argv)
    cases_by_name: dict[str, dict[str, Any]] = {}
    try:
        for one in map(records.read, arguments.results or (published() if arguments.tables else [])):
            name = records.name_of(one)
            cases_by_name[name] = records.join(cases_by_name[name], one) if name in cases_by_name else one
        if arguments.publish and (names := [name for name, one in cases_by_name.items() if one["quick"]]):
            raise ValueError(f"{', '.join(names)}: measured with --quick. Published figures need a full run")
        if arguments.publish:
            check_parts(cases_by_name)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for name, record in cases_by_name.items():
        if arguments.results:
            print(markdown(record))
        if arguments.publish:
            records.write(record, RESULTS / f"{name}.json")
        if arguments.plot:
            plots.draw(record, arguments.plot)
        if arguments.tables:
            write_tables(record, arguments.tables)
        if arguments.publish:
            plots.draw(record, RESULTS, shown_pictures())
    if arguments.publish:
        for path, text in pages().items():
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
