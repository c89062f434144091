"""Linking for an older glibc than this machine's (`tools/old_glibc.py`)."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import old_glibc

LISTING = """
Symbol table '.dynsym' contains 7 entries:
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     0: 0000000000000000     0 NOTYPE  LOCAL  DEFAULT  UND
     1: 0000000000000000     0 OBJECT  GLOBAL DEFAULT  UND _rtld_global@GLIBC_PRIVATE (30)
     2: 00000000000392b0   116 FUNC    GLOBAL DEFAULT   15 pow@@GLIBC_2.29
     3: 00000000000130c0   188 FUNC    GLOBAL DEFAULT   15 pow@GLIBC_2.2.5
     4: 0000000000085a10   110 FUNC    GLOBAL DEFAULT   15 dlopen@@GLIBC_2.34
     5: 0000000000085a10   110 FUNC    GLOBAL DEFAULT   15 dlopen@GLIBC_2.2.5
     6: 00000000001d3a40     1 OBJECT  GLOBAL DEFAULT   29 __libc_single_threaded@@GLIBC_2.32
     7: 0000000000000000     0 OBJECT  GLOBAL DEFAULT  ABS GLIBC_2.34
     8: 000000000003a5b0    34 IFUNC   GLOBAL DEFAULT   15 expf@@GLIBC_2.27
     9: 0000000000017170    99 FUNC    GLOBAL DEFAULT   15 expf@GLIBC_2.2.5
    10: 0000000000000010     8 TLS     GLOBAL DEFAULT   21 _ZSt11__once_call@@GLIBCXX_3.4.11
    11: 0000000000085a10   110 FUNC    GLOBAL DEFAULT   15 call_once@@GLIBC_2.34
    12: 0000000000085a10   110 FUNC    GLOBAL DEFAULT   15 call_once@GLIBC_2.28
"""


def test_a_symbol_is_offered_in_its_newest_version_that_the_policy_allows() -> None:
    assert old_glibc.offered(LISTING, "libc.so.6") == {
        "libc.so.6": {
            "pow": ("GLIBC_2.2.5", "FUNC"),  # not 2.29
            "expf": ("GLIBC_2.27", "IFUNC"),  # not 2.2.5
            "_ZSt11__once_call": ("GLIBCXX_3.4.11", "TLS"),
        },
        "libdl.so.2": {"dlopen": ("GLIBC_2.2.5", "FUNC")},  # where it was in 2.28; of call_once it is not known
    }


def test_stand_ins_are_for_a_machine_that_is_newer_than_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_glibc.platform, "machine", lambda: "x86_64")
    for version, wanted in (("2.36", True), ("2.28", False), ("2.17", False)):
        monkeypatch.setattr(old_glibc.platform, "libc_ver", lambda version=version: ("glibc", version))
        assert old_glibc.needed(old_glibc.POLICY) == wanted
        assert not old_glibc.needed("auto")


SOURCE = """
#include <cmath>
#include <memory>
#include <pthread.h>
#include <sstream>
#include <vector>

extern "C" int answer(double base, double exponent) {  // through what is new since glibc 2.28 and GLIBCXX_3.4.24
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  static std::shared_ptr<std::vector<double>> made;
  pthread_once(&once, [] { made = std::make_shared<std::vector<double>>(); });
  made->assign(1, pow(base, exponent));
  std::shared_ptr<std::vector<double>> held = made;
  std::ostringstream words;
  words << held->front();
  return std::stoi(words.str());
}
"""


@pytest.mark.slow
@pytest.mark.skipif(not old_glibc.needed(old_glibc.POLICY), reason="no glibc newer than 2.28 on x86-64")
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_a_library_asks_for_old_versions_alone_and_runs(tmp_path: Path) -> None:
    (tmp_path / "answer.cpp").write_text(SOURCE)

    options = ("-std=c++20", "-O0", "-shared", "-fPIC", "-Wl,--no-undefined")

    def versions(name: str, *flags: str) -> set[str]:
        command = ["g++", "answer.cpp", *options, *flags, "-o", name]
        subprocess.run(command, cwd=tmp_path, check=True)
        listing = subprocess.run(["objdump", "-T", tmp_path / name], capture_output=True, text=True, check=True).stdout
        return set(re.findall(r"\*UND\*.*\(((?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)\)", listing))

    too_new = {version for version in versions("new.so") if old_glibc._number(version) is None}
    assert {"GLIBC_2.29", "GLIBC_2.34", "GLIBCXX_3.4.26"} <= too_new, "the program tries what this is about"
    linked = versions("old.so", *old_glibc.link_flags(tmp_path).split())
    assert linked and all(old_glibc._number(version) for version in linked), linked
    assert ctypes.CDLL(str(tmp_path / "old.so")).answer(ctypes.c_double(7.0), ctypes.c_double(2.0)) == 49
