"""Lets this machine's compiler link for an older glibc: a library then asks for nothing that a manylinux_2_28 machine
lacks.

A linker takes the newest version of every symbol that it sees: `pow` of glibc 2.29 on a machine with 2.36, where `pow`
of 2.2.5 is offered too. `link_flags` makes libraries without code that offer each symbol of the machine's own in its
newest version that the policy allows, and nothing newer. What is linked against them is the same machine code; only the
versions that it asks for are others. This is what `zig cc -target x86_64-linux-gnu.2.28` does. What libstdc++ got later
is copied out of `libstdc++.a`, as gcc's toolsets for manylinux do it.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

POLICY = "manylinux_2_28_x86_64"
# https://github.com/pypa/auditwheel: the newest versions in this policy.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
# libc.so.6 took these in with glibc 2.34, where their newest version says so.
PARTS = {"pthread_": "libpthread.so.0", "sem_": "libpthread.so.0", "dl": "libdl.so.2", "shm_": "librt.so.1"}
TAKEN_IN = "GLIBC_2.34"
# Read by the headers of libstdc++ since glibc 2.32. Zero is right on every machine: "there may be other threads", so
# that counts are atomic.
THREADS = '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n'

Symbols = dict[str, tuple[str, str]]  # of a library: version and type, by name


def needed(plat: str) -> bool:
    """Whether libraries for `plat` must be linked against stand-ins here."""
    name, version = platform.libc_ver()
    newer = name == "glibc" and tuple(map(int, version.split("."))) > NEWEST["GLIBC"]
    return newer and plat == POLICY and platform.machine() == "x86_64"


def offered(listing: str, library: str) -> dict[str, Symbols]:
    """What the stand-ins offer, by library, of a library's symbols.

    listing: what `readelf --dyn-syms --wide` prints.
    """
    versions: dict[str, dict[str, str]] = {}  # of a symbol: its type, by version
    for kind, name, version in re.findall(
        r"^ *\d+: +\w+ +\w+ (\w+) .* (?:\d+|ABS) ([^@\s]+)@{1,2}(\S+)$", listing, re.M
    ):
        versions.setdefault(name, {})[version] = kind
    found: dict[str, Symbols] = {}
    for name, kinds in versions.items():
        old = [version for version in kinds if _number(version) is not None]
        if not old:
            continue
        best = max(old, key=lambda version: _number(version) or ())
        home: str | None = library
        if TAKEN_IN in kinds:
            home = next((part for prefix, part in PARTS.items() if name.startswith(prefix)), None)
        if home:
            found.setdefault(home, {})[name] = best, kinds[best]
    return found


def _number(version: str) -> tuple[int, ...] | None:
    """(2, 14) of GLIBC_2.14; None for what the policy does not allow."""
    parts = re.fullmatch(r"(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", version)
    number = tuple(map(int, parts[2].split("."))) if parts else ()
    return number if parts and number <= NEWEST[parts[1]] else None


def assembly(symbols: Symbols) -> Iterator[str]:
    """The lines of a library that has the symbols, and no code."""
    for number, (name, (version, kind)) in enumerate(sorted(symbols.items())):
        what = {"FUNC": "@function", "IFUNC": "@function", "TLS": "@tls_object"}.get(kind, "@object")
        section = '.section .tbss,"awT",@nobits' if kind == "TLS" else ".text"
        yield (
            f"{section}\n.globl s{number}\n.type s{number}, {what}\n.symver s{number}, {name}@@@{version}\ns{number}: "
            f".zero 1"
        )


def link_flags(scratch: Path, cxx: str = "g++") -> str:
    """Makes the stand-ins in a folder of `scratch`. Returns what `cxx`, which must be gcc, needs on its command line to
    link against them."""
    folder = scratch / "old_glibc"
    folder.mkdir()
    made: dict[str, Symbols] = {}
    for library in ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libstdc++.so.6"):
        listing = _output("readelf", "--dyn-syms", "--wide", _path(cxx, library))
        for home, symbols in offered(listing, library).items():
            made.setdefault(home, {}).update(symbols)
    for library, symbols in made.items():
        _link(folder, cxx, library, symbols)
    (folder / "threads.c").write_text(THREADS)
    _output(cxx, "-x", "c", "-fPIC", "-c", folder / "threads.c", "-o", folder / "threads.o")
    _output("ar", "rc", folder / "libthreads.a", folder / "threads.o")
    parts = " ".join(str(folder / part) for part in dict.fromkeys(PARTS.values()))
    own = f"{folder / 'libc.so.6'} {folder / 'libthreads.a'} AS_NEEDED ( {parts} )"
    script = Path(_path(cxx, "libc.so")).read_text()
    (folder / "libc.so").write_text(re.sub(r"\S*/libc\.so\.6", own, script))
    (folder / "libm.so").write_text(f"INPUT ( {folder / 'libm.so.6'} )\n")
    (folder / "libstdc++.so").write_text(f"INPUT ( {folder / 'libstdc++.so.6'} {_path(cxx, 'libstdc++.a')} )\n")
    return f"-L{folder} -Wl,--exclude-libs,libstdc++.a"


def _link(folder: Path, cxx: str, library: str, symbols: Symbols) -> None:
    source, nodes = folder / f"{library}.s", folder / f"{library}.map"
    source.write_text("\n".join(assembly(symbols)) + "\n")
    nodes.write_text("".join(f"{version} {{ }};\n" for version in sorted({version for version, _ in symbols.values()})))
    options = ("-shared", "-nostdlib", f"-Wl,-soname,{library}", f"-Wl,--version-script,{nodes}")
    _output(cxx, *options, source, "-o", folder / library)


def _path(cxx: str, name: str) -> str:
    return _output(cxx, f"-print-file-name={name}").strip()


def _output(*argv: str | Path) -> str:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, argv))} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout
