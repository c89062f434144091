"""The end of `fastsam info`: the one thing worth doing first on a machine, and where to begin."""

import sys

import pytest

from fastsam.lab import cli, next_steps

NATIVE, CUDA, TRITON = ("native", "cpu"), ("native", "cuda"), ("triton", "cuda")


@pytest.mark.parametrize(
    ("unavailable", "torch_cuda", "gpu", "programs", "expected"),
    [
        ([NATIVE, CUDA, TRITON], None, False, ["g++"], "next:  `python -m fastsam_kernels.build` compiles the CPU "
                                                       "kernels"),
        ([NATIVE, CUDA, TRITON], None, False, [], "next:  install a C++ compiler (`apt-get install g++`), then `python "
                                                  "-m"),
        ([CUDA, TRITON], None, False, ["nvidia-smi"], "next:  this torch is built without CUDA, and there is a GPU"),
        ([CUDA, TRITON], None, False, [], None),
        ([CUDA, TRITON], "13.0", False, ["nvidia-smi"], None),  # a driver that torch cannot use is no matter of builds
        ([CUDA], "13.0", True, ["nvcc"], "next:  Triton serves the GPU; for the compiled kernels `python -m "
                                         "fastsam_kernels.build --cuda`"),
        ([CUDA], "13.0", True, [], "next:  Triton serves the GPU; for the compiled kernels install nvcc"),
        ([CUDA, TRITON], "13.0", True, [], "next:  for the GPU `pip install triton`, or install nvcc"),
        ([], "13.0", True, [], None),
    ],
)  # fmt: skip
def test_what_is_missing_comes_first(
    unavailable: list[tuple[str, str]],
    torch_cuda: str | None,
    gpu: bool,
    programs: list[str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    reasons = dict.fromkeys(unavailable, "why")
    monkeypatch.setattr("shutil.which", lambda name: name if name in programs else None)
    steps = next_steps.steps(reasons, torch_cuda=torch_cuda, gpu=gpu)
    assert steps[-1] == next_steps.START
    if expected is None:
        assert len(steps) == 1
    else:
        assert len(steps) == 2 and steps[0].startswith(expected)


def test_a_compiler_of_another_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "my-c++ -v")
    monkeypatch.setattr("shutil.which", lambda name: name if name == "my-c++" else None)
    steps = next_steps.steps({NATIVE: "why"}, torch_cuda=None, gpu=False)
    assert "compiles the CPU kernels" in steps[0]


def test_info_ends_with_it_and_what_it_names_works(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(next_steps.START)
    assert "`fastsam reproduce --list`" in next_steps.START and cli.main(["reproduce", "--list"]) == 0


def test_a_terminal_gets_info_in_lines_that_fit(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60 and next_steps.START in " ".join(line.strip() for line in lines)
