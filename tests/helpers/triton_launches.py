"""Every Triton op through Triton's own compiler and driver on a CUDA library without a device; prints the launches as
JSON.

Run in a separate process as `python -m tests.helpers.triton_launches FOLDER`, as `tests.helpers.stub_driver` says.
"""

import ctypes
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastsam_kernels import triton_backend, triton_launch, triton_op
from tests.gpu.sanitized import every_op
from tests.helpers import stub_driver
from tests.helpers.gpu_step import Step

Lines = list[list[str]]


class Log:
    """The launches that the CUDA library received."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / "libcuda.so.1"))
        self._library.fake_log.restype = ctypes.c_char_p

    def take(self) -> Lines:
        """Return the launches since the last call, a list of words each."""
        lines = self._library.fake_log().decode().splitlines()
        self._library.fake_forget()
        return [line.split() for line in lines]


def launch_twice(kernel: Any, programs: int, device: torch.device, args: dict[str, Any]) -> partial[None]:
    """Return a call that launches by Triton's own function, and then without it."""
    call = triton_launch.launch_call(kernel, programs, device, args)
    assert call.func is not triton_launch._launch_by_triton, f"Triton {triton_launch.VERSION} launches {kernel} itself"

    def launches() -> None:
        triton_launch._launch_by_triton(kernel, programs, device, args)
        call()

    return partial(launches)


def op_launches(log: Log) -> dict[str, Lines]:
    """Return the launches of every op, each by Triton and then without it."""
    triton_op.launch_call = launch_twice
    launches: dict[str, Lines] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 2):
            step = Step([33, 0, 4097, 5], rows, dtype=dtype, device="cpu", master=dtype == torch.bfloat16)
            every_op(triton_backend, step, shift=0)
            launches[f"{str(dtype).removeprefix('torch.')} {rows}"] = log.take()
    launches["unaligned"] = unaligned_launches(step, log)
    triton_op.launch_call = triton_launch.launch_call
    return launches


def unaligned_launches(step: Step, log: Log) -> Lines:
    """Return the launches of one op with the device scalars at a multiple of 16 bytes, and then 8 bytes later."""
    memory = torch.zeros(step.hparams.numel() + 1, dtype=torch.float64)
    for shift in (0, 1):
        hparams = memory[shift : shift + step.hparams.numel()].view_as(step.hparams).copy_(step.hparams)
        triton_backend.norm_(step.sumsq, step.g1, [], step.table, hparams)
    return log.take()


def prepared_launches(log: Log) -> dict[str, Any]:
    """Return the launches of prepared steps and of the ops, with the gradients aligned, then not, then aligned.

    "private" has the addresses that belong to the prepared step: memory of the norm, tables of gradients.
    """
    step = Step([33, 0, 4097, 5], device="cpu")
    operands, kernels = (step.backup, step.table, step.hparams), triton_backend
    calls = kernels.direct_calls(step.params, *operands)
    assert calls is not None
    shifted = [torch.cat([g[:1], g])[1:] for g in step.g1]
    prepared, ops = [], []
    for grads in (step.g1, shifted, step.g1):
        calls.norm_perturb_(grads, step.sumsq, False)
        for call in calls.update("sgd", [step.momentum], grads):
            call()
        prepared += log.take()
        kernels.norm_(step.sumsq, grads, [], step.table, step.hparams)
        kernels.perturb_(step.params, step.backup, grads, step.table, step.hparams, step.sumsq, True)
        kernels.update_(step.params, step.backup, grads, step.table, step.hparams, "sgd", [step.momentum])
        ops += log.take()
    tables = calls._first_grads, calls._second_grads
    private = [*calls._sums, *(table.addresses.operand.pointer for table in tables)]
    return {"prepared": prepared, "ops": ops, "private": [f"{tensor.data_ptr():x}" for tensor in private]}


def own_launches(log: Log) -> dict[str, bool]:
    """Return True for each situation in which Triton's own function launches, and launches the same."""
    from triton import knobs

    step = Step([33, 5], device="cpu")

    def launches(situation: str) -> Lines:
        assert triton_launch.avoids_triton(step.sumsq.device) == (situation == "none"), situation
        triton_backend.restore_(step.params, step.backup, step.table)
        return log.take()

    expected, results = launches("none"), {}
    version, triton_launch.VERSION = triton_launch.VERSION, "3.5"
    results["version"] = launches("version") == expected
    triton_launch.VERSION = version
    calls: list[Any] = []
    knobs.runtime.launch_enter_hook.add(calls.append)
    results["hook"] = launches("hook") == expected and len(calls) == 1
    knobs.runtime.launch_enter_hook.remove(calls.append)
    return results


def main(folder: Path) -> dict[str, Any]:
    stub_driver.use()
    log = Log(folder)
    results = {"ops": op_launches(log), "steps": prepared_launches(log), "own": own_launches(log)}
    return {"version": triton_launch.VERSION, **results}


if __name__ == "__main__":
    json.dump(main(Path(sys.argv[1])), sys.stdout)
