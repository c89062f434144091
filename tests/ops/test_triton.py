"""The Triton backend: its tables on the device, torch.compile, and the machines on which it can run."""

import importlib
import inspect
import os
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastsam import backends
from fastsam_kernels import reference
from fastsam_kernels.hparams import HParam
from fastsam_kernels.rule import MAX_STATE, UpdateOptions
from tests.helpers import native_step

tables = pytest.importorskip("fastsam_kernels.triton_tables", reason="Triton is not installed")
triton_backend = pytest.importorskip("fastsam_kernels.triton_backend")
triton_staging = pytest.importorskip("fastsam_kernels.triton_staging")
triton_update = pytest.importorskip("fastsam_kernels.triton_update")

CPU_PLACE = tables.place_of(torch.device("cpu"))
CPU = triton_backend.why_not("cpu")
needs_interpreter = pytest.mark.skipif(CPU is not None, reason=f"Triton on the CPU: {CPU}")
CUDA = triton_backend.why_not("cuda")
needs_gpu = pytest.mark.skipif(CUDA is not None, reason=f"Triton on CUDA: {CUDA}")


Step = partial(native_step.Step, shapes=[(6, 4), (6,), (5000,)])


@needs_interpreter
def test_tensors_that_moved_are_found() -> None:
    """Gradients at other addresses in every step, some of them where others were: no stale table is ever used."""
    actual, expected = Step(), Step()
    for seed in range(4):
        new_step = Step(seed=seed)  # the former step's gradients are freed, and their memory is handed out again
        actual.take(triton_backend, actual.params, new_step.g1, new_step.g2)
        expected.take(reference, expected.params, new_step.g1, new_step.g2)
        actual.params = [p.clone() for p in actual.params]
    for a, b in zip(actual.params, expected.params, strict=True):
        torch.testing.assert_close(a, b)


@needs_interpreter
def test_tables_are_made_once_per_content() -> None:
    step = Step()
    plan = tables.chunk_table_of(step.table, CPU_PLACE)
    assert tables.chunk_table_of(step.table.clone(), CPU_PLACE) is plan
    operand, _ = tables.operand_of(step.params, plan, 1, CPU_PLACE)
    assert tables.operand_of(list(step.params), plan, 1, CPU_PLACE)[0].pointer is operand.pointer
    assert tables.operand_of(step.g1, plan, 1, CPU_PLACE)[0].pointer is not operand.pointer
    other_table = step.table.clone()
    other_table[0, 1] = 5
    assert tables.chunk_table_of(other_table, CPU_PLACE).n_chunks == plan.n_chunks
    assert tables.chunk_table_of(other_table, CPU_PLACE).lengths[0] == 5
    for i in range(2 * tables.ENTRIES):
        tables.chunk_table_of(torch.tensor([[16 * i, 1, 0, 0]]), CPU_PLACE)
    assert len(tables._plans._entries) == tables.ENTRIES


@needs_interpreter
def test_the_sum_of_addresses_does_not_stand_for_them() -> None:
    """Tensors that swap their places have the same sum."""
    step = Step()
    plan = tables.chunk_table_of(step.table, CPU_PLACE)
    tensors = [torch.zeros(5000) for _ in range(3)]
    for order in ([0, 1, 2], [1, 0, 2], [0, 1, 2]):
        operand, _ = tables.operand_of([tensors[i] for i in order], plan, 1, CPU_PLACE)
        assert operand.pointer[0].tolist() == [tensors[i].data_ptr() for i in order]


@needs_interpreter
def test_new_addresses_are_uploaded_once_per_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of the weights, and of a gradient's list that two ops read, are uploaded once."""
    step, uploads = Step(), list[int]()
    upload = tables.upload_words
    monkeypatch.setattr(tables, "upload_words", lambda words, t: uploads.append(1) or upload(words, t))
    for count in (3, 2, 2):  # in the first step the weights too
        step.take(triton_backend, step.params, step.g1, step.g2)
        assert len(uploads) == count
        step.g1, step.g2 = ([g.clone() for g in grads] for grads in (step.g1, step.g2))
        uploads.clear()
    step.take(triton_backend, step.params, step.g1, step.g2)
    uploads.clear()
    step.take(triton_backend, step.params, step.g1, step.g2)
    assert not uploads


def test_memory_of_uploads_is_used_again() -> None:
    """Uploads of two lengths in turn. A buffer is written again only after all others of its length."""
    staging, places = triton_staging.Staging(), list[list[int]]([[], []])
    targets = [torch.zeros(n, dtype=torch.int64) for n in (3, 5)]
    for k in range(6 * triton_staging.BUFFERS):
        target = targets[k % 2]
        numbers = [k + i for i in range(target.numel())]
        staging.upload(tables.pack(numbers), target)
        assert target.tolist() == numbers
        places[k % 2].append(staging._buffers[target.device, target.nbytes][0]._memory.data_ptr())
    for of_length in places:
        first = of_length[: triton_staging.BUFFERS]
        assert len(set(first)) == len(first)
        assert of_length == 3 * first


def test_memory_is_written_again_after_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: the last upload has ended, and after an interrupt the memory is not used again."""
    log: list[str] = []

    class Event:
        def synchronize(self) -> None:
            log.append("wait")

        def record(self, stream: str) -> None:
            log.append(f"record on {stream}")

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **options: empty(*args, **options))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    buffer, target = triton_staging._Buffer(torch.device("cuda", 1)), torch.zeros(2, dtype=torch.int64)
    for numbers in ([1, 2], [3, 4]):
        buffer.upload(tables.pack(numbers), target)
        assert target.tolist() == numbers
        assert log == ["wait", "record on the stream of cuda:1"]
        log.clear()
    assert buffer._memory is not None
    with pytest.raises(RuntimeError, match="size"):
        buffer.upload(tables.pack([5, 6]), torch.zeros(3, dtype=torch.int64))
    assert buffer._memory is None


def test_chunks_cover_every_element_once() -> None:
    table = torch.tensor([[0, 0, 0, 0], [16, 4096, 0, 1], [4112, 4097, 1, 2], [9000, 0, 0, 3], [9008, 1, 0, 4]])
    plan = tables._make_chunk_table(table, CPU_PLACE)
    chunks = plan.chunks.reshape(-1, 2).tolist()
    assert chunks == [[1, 0], [2, 0], [2, 4096], [4, 0]]
    assert plan.table.reshape(-1, 4).tolist() == table.tolist()
    assert not plan.is_aligned or not (table[:, 0] % 16).any()


@pytest.mark.parametrize(
    ("shift", "dtype", "is_aligned"),
    [(0, torch.float32, True), (1, torch.float32, False), (4, torch.float32, True), (4, torch.bfloat16, False)],
)
def test_alignment_is_that_of_the_addresses(shift: int, dtype: torch.dtype, is_aligned: bool) -> None:
    memory = torch.zeros(200, dtype=dtype)
    plan = tables.chunk_table_of(torch.tensor([[0, 64, 0, 0], [64, 32, 0, 1]]), CPU_PLACE)
    assert plan.is_aligned
    views = [memory[shift : shift + 64], memory[64 : 64 + 32]]
    assert tables.operand_of(views, plan, 1, CPU_PLACE)[1] is is_aligned
    assert tables.field_of(memory[shift : shift + 96].reshape(1, 96), 1)[1] is is_aligned
    operand, rows_are_aligned = tables.field_of(memory.as_strided((2, 30), (33, 1)), 2)
    assert not rows_are_aligned
    assert operand.stride == 33


@needs_interpreter
def test_compiled_without_graph_breaks() -> None:
    eager_step, compiled_step = Step(seed=7), Step(seed=7)

    def step(s: native_step.Step, params: list[Tensor]) -> None:
        s.take(triton_backend, params, s.g1, s.g2)

    step(eager_step, eager_step.params)
    torch.compile(step, fullgraph=True, backend="aot_eager")(compiled_step, compiled_step.params)
    for a, b in zip(eager_step.params, compiled_step.params, strict=True):
        assert torch.equal(a, b)


def test_launchers_have_the_signatures_of_their_twins() -> None:
    """Names, kinds and defaults, which the types and the schemas of `compilable` take for granted."""
    for name in set(triton_backend.__all__) - {"direct_calls", "update_", "why_not"}:
        signatures = (inspect.signature(getattr(module, name)) for module in (triton_backend, reference))
        mine, expected = ([(p.name, p.kind, p.default) for p in s.parameters.values()] for s in signatures)
        assert mine == expected, name


def test_the_options_of_an_update_are_those_of_the_reference() -> None:
    """The fields of a state come one by one in the launcher, and the options as one struct."""
    launcher, twin = (inspect.signature(f).parameters.values() for f in (triton_update._update_, reference.update_))
    names = [p.name for p in twin if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "state"]
    fields = [f"state{i}" for i in range(MAX_STATE)]
    assert [p.name for p in launcher if p.kind is not p.VAR_KEYWORD] == [*names, *fields]
    assert UpdateOptions._field_defaults == {p.name: p.default for p in twin if p.kind is p.KEYWORD_ONLY}


@needs_interpreter
@pytest.mark.parametrize(
    "op",
    [
        *("norm_", "dual_perturb_", "_update_"),
        *(
            pytest.param(op, marks=pytest.mark.slow)
            for op in ("perturb_", "restore_", "dual_norm_", "inner_", "accumulate_")
        ),
    ],
)
def test_opcheck(op: str) -> None:
    step = Step()
    args = {
        "norm_": (step.sumsq, step.g1, step.params, step.table, step.h),
        "perturb_": (step.params, step.backup, step.g1, step.table, step.h, step.sumsq, True),
        "restore_": (step.params, step.backup, step.table),
        "dual_norm_": (step.sumsq, step.g1, step.mu, step.s, step.table, step.h),
        "dual_perturb_": (
            *(step.params, step.backup, step.mu, step.g1, step.s, step.table, step.h, step.sumsq),
            step.v,
        ),
        "inner_": (torch.zeros(1, 2, dtype=torch.float64), step.g1, step.g2, step.table),
        "accumulate_": (torch.zeros(9).long(), torch.zeros(9).long(), torch.ones(9), 0.1),
        "_update_": (
            *(step.params, step.backup, step.g1, step.table, step.h, "sgd"),
            *(step.m, None, None),
        ),
    }[op]
    options = {"g1": step.g2} if op == "_update_" else {}
    torch.library.opcheck(getattr(torch.ops.fastsam_triton, op).default, args, options)


@pytest.mark.slow  # starts a process
def test_the_cpu_is_served_in_the_interpreter_only() -> None:
    """These tests run in it (conftest.py) where there is no GPU."""
    code = "from fastsam_kernels import triton_backend as t; print(t.why_not('cpu')); print(t.why_not('cuda'))"
    for value, cpu in (("0", "set TRITON_INTERPRET=1 before Python starts"), ("1", "None")):
        if value == os.environ.get("TRITON_INTERPRET"):
            reasons = [str(triton_backend.why_not(device)) for device in ("cpu", "cuda")]
        else:
            env = os.environ | {"TRITON_INTERPRET": value}
            process = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
            reasons = process.stdout.splitlines()
        assert cpu in reasons[0]
        if not torch.cuda.is_available():
            assert reasons[1] == "torch sees no CUDA device"
        elif value == "1":
            assert "unset it" in reasons[1]
    assert "no Triton kernels for the device 'mps'" in triton_backend.why_not("mps")


@pytest.mark.slow  # starts a process
def test_without_triton_the_backend_says_so() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from fastsam import backends\n"
        "print(*[b.reason for b in backends.table() if b.name == 'triton'], sep='\\n')\n"
        "print(backends.select('auto', torch.device('cpu'), torch.float32).name)\n"
        "backends.select('triton', torch.device('cpu'), torch.float32)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    *reasons, auto = process.stdout.splitlines()
    assert len(reasons) == 2 and all("pip install triton" in reason for reason in reasons)
    assert auto in ("native", "foreach")
    assert "backend 'triton' cannot serve torch.float32 on cpu: triton: Triton cannot be imported" in process.stderr


def test_without_a_c_compiler_gpus_are_not_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton compiles its launcher at first use: better to say so before `auto` takes it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_backend, "INTERPRETED", False)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
    assert "has no Python.h; install python3-dev" in triton_backend.why_not("cuda")
    (tmp_path / "Python.h").touch()
    assert triton_backend.why_not("cuda") is None
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert "install gcc or clang, or set CC" in triton_backend.why_not("cuda")


def test_auto_never_takes_the_interpreter() -> None:
    assert backends.select("auto", torch.device("cpu"), torch.float32).name != "triton"


@needs_gpu
def test_a_captured_step_follows_the_schedule_and_the_gradients() -> None:
    """Replays of a captured step read the learning rate of the moment, and gradients where the graph has them."""
    actual, expected = Step(device="cuda"), Step(device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    start = [p.clone() for p in actual.params]
    with torch.cuda.stream(stream):
        actual.take(triton_backend, actual.params, [g.clone() for g in actual.g1], actual.g2)
    torch.cuda.current_stream().wait_stream(stream)
    for p, value in zip(actual.params, start, strict=True):
        p.copy_(value)
    actual.m.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual.take(
            triton_backend, actual.params, [g * 1 for g in actual.g1], actual.g2
        )  # gradients in the graph's own memory
    for i in range(3):
        for step in (actual, expected):
            step.h[..., HParam.LR] = 0.1 / (i + 1)
            for g in step.g1:
                g.mul_(1.5)
        graph.replay()
        expected.take(reference, expected.params, expected.g1, expected.g2)
    for a, b in zip(actual.params, expected.params, strict=True):
        torch.testing.assert_close(a, b)


@needs_gpu
def test_prepared_steps_leave_the_tables_of_a_graph() -> None:
    """A graph that was captured between prepared steps reads its own gradients, whatever gradients come later."""
    actual, expected, first = Step(device="cuda"), Step(device="cuda"), Step(device="cuda", seed=1)
    first.take(triton_backend, first.params, first.g1, first.g2)  # compiles the kernels, which no capture may do
    calls = triton_backend.direct_calls(actual.params, actual.backup, actual.table, actual.h)

    def step(g1: list[Tensor], g2: list[Tensor]) -> None:
        calls.norm_perturb_(g1, actual.sumsq, False)
        for call in calls.update("sgd", [actual.m], g2):
            call()
        expected.take(reference, expected.params, g1, g2)

    step(actual.g1, actual.g2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step([g * 2 for g in actual.g1], [g * 2 for g in actual.g2])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert calls.is_watched()
        actual.take(triton_backend, actual.params, actual.g1, actual.g2)
    for factor in (3, 4):
        step([g * factor for g in actual.g1], [g * factor for g in actual.g2])
        graph.replay()
        expected.take(reference, expected.params, expected.g1, expected.g2)
    for a, b in zip(actual.params, expected.params, strict=True):
        torch.testing.assert_close(a, b)


def test_no_kernel_names_a_parameter_as_tritons_launcher_does() -> None:
    """A kernel parameter with the name of a variable in Triton's generated launcher would be overwritten there."""
    num_kernels = 0
    for module in ("dual", "reductions", "norm", "perturb", "update"):
        functions = vars(importlib.import_module(f"fastsam_kernels.triton_{module}"))
        for kernel in (value for name, value in functions.items() if name.endswith("_kernel")):
            names = inspect.signature(kernel.fn).parameters
            assert not {"params", "specialization", "options"} & set(names), kernel
            num_kernels += 1
    assert num_kernels == 9
