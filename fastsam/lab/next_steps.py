"""The last lines of `fastsam info`: a missing part of this machine, and how to begin."""

from __future__ import annotations

import os
import shutil

BUILD = "python -m fastsam_kernels.build"
START = (
    "begin: opt = fastsam.FusedSAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1) in a loop of your own, or "
    "`fastsam demo` for federated runs on data that come along; `fastsam reproduce --list` has more"
)


def steps(reasons: dict[tuple[str, str], str], *, torch_cuda: str | None, gpu: bool) -> list[str]:
    """Return one or two paragraphs: the most useful thing to install, if any, and how to begin.

    Args:
        reasons: reasons why backends cannot be used, by (name, device).
        torch_cuda: CUDA version that torch is built for, or None.
        gpu: True if torch sees a GPU.
    """
    native, cuda = (reasons.get(("native", device)) for device in ("cpu", "cuda"))
    if native is not None:
        compilers = [os.environ.get("CXX", "").split(" ")[0], "g++", "clang++", "c++"]
        if any(name and shutil.which(name) for name in compilers):
            todo = f"`{BUILD}` compiles the CPU kernels, in some minutes"
        else:
            todo = f"install a C++ compiler (`apt-get install g++`), then `{BUILD}`"
        return [f"next:  {todo}; without them steps are the same, and slower", START]
    if not gpu and torch_cuda is None and shutil.which("nvidia-smi"):
        return [
            "next:  this torch is built without CUDA, and there is a GPU: https://pytorch.org/get-started has the one "
            "for it",
            START,
        ]
    if gpu and cuda is not None:
        triton = ("triton", "cuda") not in reasons
        lead = "Triton serves the GPU; for the compiled kernels " if triton else "for the GPU `pip install triton`, or "
        nvcc = "" if shutil.which("nvcc") else "install nvcc (the CUDA toolkit), then "
        return [f"next:  {lead}{nvcc}`{BUILD} --cuda`", START]
    return [START]
