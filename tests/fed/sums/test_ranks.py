"""Several processes, one run: the same bits for any number of ranks, and an end in seconds when one dies."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from fastsam.fed.sums import ranks
from fastsam.fed.sums.ranks import RankError, Ranks, join_ranks
from fastsam.lab import cli
from tests.helpers import fed_ranks, rank_cases
from tests.helpers.fed_rundir import records
from tests.helpers.places import ROOT
from tests.helpers.rank_group import on_ranks


def torchrun(ranks: int, *arguments: str) -> subprocess.Popen[str]:
    """Start a module on ranks."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*argv, *arguments], cwd=ROOT, env=env, text=True, start_new_session=True, **pipes)


def start(ranks: int, directory: Path, **options: object) -> subprocess.Popen[str]:
    return torchrun(ranks, "tests.helpers.fed_ranks", str(directory), *(f"{k}={v}" for k, v in options.items()))


def children(pid: int) -> list[int]:
    """Return the process ids of a launcher's ranks, each of which has a separate session."""
    process = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in process.stdout.split()]


def launch(ranks: int, directory: Path, **options: object) -> subprocess.CompletedProcess[str]:
    process = start(ranks, directory, **options)
    out, error = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def hashes(process: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert process.returncode == 0, process.stderr
    return dict(line.split() for line in process.stdout.splitlines())


@pytest.fixture(scope="module")
def single_run() -> dict[str, str]:
    return {name: fed_ranks.train(name, None) for name in fed_ranks.ALGORITHMS}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_ends_in_the_same_bits(tmp_path: Path, single_run: dict[str, str], ranks: int) -> None:
    assert hashes(launch(ranks, tmp_path)) == single_run


@pytest.mark.slow
def test_ranks_end_with_their_launcher(tmp_path: Path, single_run: dict[str, str]) -> None:
    """Only torchrun is killed: its ranks must not train next to the ranks of a resumed run."""
    process = start(2, tmp_path, algorithms="scaffold", rounds=1000)
    log = tmp_path / "scaffold" / "metrics.jsonl"
    while not log.exists():
        time.sleep(0.05)
    assert len(children(process.pid)) == 2
    process.kill()
    process.communicate(timeout=20)  # until the last process that holds the pipes has ended


COMMAND = (
    "run examples/digits.toml --rounds {rounds} --clients 6 --participation 0.9 --model mlp --local-epochs 1 "
    "--checkpoint-every 1 --executor sequential"
)


def command(ranks: int, directory: Path, rounds: int, *flags: str) -> subprocess.Popen[str]:
    return torchrun(ranks, "fastsam", *COMMAND.format(rounds=rounds).split(), "--run-dir", str(directory), *flags)


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends it with the command that continues it; two ranks write what one writes, and say it once."""
    process = command(2, tmp_path / "two", 1000)
    log = tmp_path / "two" / "metrics.jsonl"
    while not (log.exists() and log.read_text().count("\n") > 2):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0 and "Continue with:" in error
    rounds = len(records(tmp_path / "two")) + 2
    monkeypatch.chdir(ROOT)
    for name, flags in (("two", ["--resume"]), ("one", [])):
        argv = [*COMMAND.format(rounds=rounds).split(), "--run-dir", str(tmp_path / name), *flags]
        assert cli.main(argv) == 0
    assert records(tmp_path / "two") == records(tmp_path / "one")


@pytest.mark.slow
def test_a_killed_run_resumed_on_other_ranks_has_the_same_bits(tmp_path: Path, single_run: dict[str, str]) -> None:
    """SIGKILL to all processes at 20 random instants, each time going on with another number of ranks, executor and
    number of slots."""
    random_, kills = random.Random(0), 0
    began = time.monotonic()
    hashes(launch(2, tmp_path / "timing", algorithms="fedlesam-d", rounds=12))
    seconds = time.monotonic() - began
    ranks = executor = slots = None
    while kills < 20:
        ranks = random_.choice([r for r in (1, 2, 3) if r != ranks])
        executor, slots = random_.choice(["sequential", "threads"]), random_.choice([1, 3, 7])
        options = {"algorithms": "fedlesam-d", "rounds": 12, "resume": "true", "executor": executor, "slots": slots}
        process = start(ranks, tmp_path / "killed", **options)
        try:
            process.communicate(timeout=random_.uniform(0.2, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            for pid in (process.pid, *children(process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()
            kills += 1
    expected = hashes(launch(1, tmp_path / "undisturbed", algorithms="fedlesam-d", rounds=12))
    assert hashes(launch(2, tmp_path / "killed", algorithms="fedlesam-d", rounds=12, resume="true")) == expected


def test_clients_are_dealt_longest_first_and_stay_at_home_where_it_costs_nothing() -> None:
    ranks = Ranks(0, 2)
    work = {0: 10, 1: 9, 2: 8, 3: 7, 4: 1}
    assignment = ranks.assign(list(work), work, {})
    assert assignment == {0: 0, 1: 1, 2: 1, 3: 0, 4: 0}
    assert ranks.assign([0, 1], {0: 5, 1: 5}, {0: 1, 1: 0}) == {0: 1, 1: 0}
    assert Ranks().assign([3, 1], {3: 1, 1: 2}, {}) == {1: 0, 3: 0}


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 5)), max_size=30))
def test_every_client_is_dealt_to_whoever_has_least(size: int, clients: list[tuple[int, int | None]]) -> None:
    work = {i: steps for i, (steps, _) in enumerate(clients)}
    owner_ranks = {i: home % size for i, (_, home) in enumerate(clients) if home is not None}
    assignment = Ranks(0, size).assign(list(work), work, owner_ranks)
    loads = [0] * size
    for i in sorted(work, key=lambda i: (-work[i], i)):
        minimum = [rank for rank in range(size) if loads[rank] == min(loads)]
        home = owner_ranks.get(i, 0)
        assert assignment[i] == (home if home in minimum else minimum[0])
        loads[assignment[i]] += work[i]
    assert sorted(assignment) == sorted(work)


def test_a_launcher_that_says_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RankError, match=r"RANK.*torchrun"), join_ranks():
        pass
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(RankError, match="number of processes, got 'two'"), join_ranks():
        pass


def test_ranks_that_cannot_connect_say_which_interface_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a machine's name resolves to 127.0.0.1, as on Debian, gloo uses that address."""
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "10.9.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)

    def refuse_connection(*_: object, **__: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with Connection refused, remote=[127.0.0.1]:36754")

    store = HashStore()
    store.set("device of rank 1", "")
    monkeypatch.setattr("torch.distributed.rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr("torch.distributed.init_process_group", refuse_connection)
    with pytest.raises(RankError, match=r"Connection refused.*GLOO_SOCKET_IFNAME=eth0"), join_ranks():
        pass


# --- Several ranks on one machine's GPUs.


@pytest.mark.parametrize(
    ("local_rank", "local_ranks", "gpus", "index", "on_a_gpu"),
    [(0, 1, 1, 0, 1), (3, 4, 4, 3, 1), (3, 4, 1, 0, 4), (5, 6, 4, 1, 2), (2, 3, 2, 0, 2), (1, 2, 0, 0, 2)],
)
def test_ranks_take_the_gpus_of_a_machine_in_turn(
    local_rank: int, local_ranks: int, gpus: int, index: int, on_a_gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert ranks.local_device() == torch.device("cuda", index) and ranks.ranks_per_device() == on_a_gpu


@pytest.mark.parametrize(
    ("places", "backend"),
    [
        ([("one", 0), ("one", 1), ("two", 0)], "cpu:gloo,cuda:nccl"),
        ([("one", 0), ("one", 0), ("two", 0)], "cpu:gloo"),  # also on the machine with one rank
        ([("one", 0), ("two", None)], "cpu:gloo"),
    ],
)
def test_all_ranks_use_gloo_if_two_share_a_gpu(
    places: list[tuple[str, int | None]], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, answers = HashStore(), []
    for rank, (host, gpu) in reversed([*enumerate(places)]):
        for other, (name, index) in enumerate(places):  # the other ranks have set theirs
            store.set(f"device of rank {other}", "" if index is None else f"{name} {index}")
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        monkeypatch.setenv("LOCAL_RANK", str(gpu or 0))
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpu=gpu: 0 if gpu is None else 2)
        answers.append(ranks.backends(store, rank, len(places)))
    assert answers == [backend] * len(places)


@pytest.mark.parametrize(("config", "device"), [("cpu:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cuda")])
def test_sums_go_over_the_cpu_without_nccl(config: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda: config)
    assert ranks.sum_device(torch.device("cuda")).type == device
    assert ranks.sum_device(torch.device("cpu")).type == "cpu"


# --- Several ranks, what can be odd about them: on processes that fork, without a launcher (see `rank_group`).


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return rank_cases.train_all(0, None)


def test_the_cases_are_what_they_are_called(one_rank: dict[str, Any]) -> None:
    assert 0 < one_rank["excluded"][2] < 3 * len(rank_cases.SIZES)
    assert 0 < one_rank["client error"][2] < 3 * len(rank_cases.SIZES)
    assert one_rank["outlier"][2] > 0
    assert len({digest for digest, _, _ in one_rank.values()}) == len(one_rank)


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_ends_as_one_alone(size: int, one_rank: dict[str, Any]) -> None:
    """Weights, records, measures, exclusions and the size of the state."""
    assert on_ranks(size, rank_cases.train_all, None) == [one_rank] * size


def test_the_directory_is_that_of_rank_0(tmp_path: Path) -> None:
    assert len({*on_ranks(3, rank_cases.other_directories, tmp_path)}) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["first"]


def test_files_of_three_ranks_are_resumed_by_two_and_those_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    on_ranks(3, rank_cases.resume_run, folder, 2)
    files = {p.name for p in (folder / "checkpoint").glob("clients-*")}
    assert {name.split("-")[2][0] for name in files} == {"0", "1", "2"}
    on_ranks(2, rank_cases.resume_run, folder, 4)
    assert rank_cases.resume_run(0, folder, 6) == rank_cases.resume_run(0, tmp_path / "one_rank", 6)


@pytest.mark.alone
def test_an_error_on_one_rank_ends_the_others_in_seconds(tmp_path: Path) -> None:
    began = time.monotonic()
    first, second = on_ranks(2, rank_cases.fails_on_rank_1, tmp_path / "run")
    assert time.monotonic() - began < 30
    assert first.startswith("RankError: a rank of this run has died or was stopped")
    assert second.startswith("ClientError: client") and "ValueError: bad labels" in second
    assert rank_cases.resume_run(0, tmp_path / "run", 4) == rank_cases.resume_run(0, tmp_path / "one_rank", 4)


def test_ctrl_c_is_told_as_such_and_the_run_continues(tmp_path: Path) -> None:
    first, second = on_ranks(2, rank_cases.interrupt_run, tmp_path / "run")
    assert first == "KeyboardInterrupt: by the user" and second.startswith("RankError")
    assert rank_cases.resume_run(0, tmp_path / "run", 4) == rank_cases.resume_run(0, tmp_path / "one_rank", 4)


def test_ranks_that_are_not_alike_are_refused() -> None:
    for answer in on_ranks(2, rank_cases.other_weights):
        assert answer.startswith(
            "RankError: all ranks must have the same options, but 'weights' differs between ranks 0 and 1"
        )


def test_a_robust_rule_needs_the_rows_of_all_clients() -> None:
    for answer in on_ranks(2, rank_cases.robust):
        assert answer.startswith("ValueError: aggregation='median' needs one process, but the run has")


def test_the_cohort_is_that_of_rank_0() -> None:
    assert on_ranks(3, rank_cases.own_dice) == [rank_cases.own_dice(0)] * 3


def test_a_rank_that_dies_is_noticed() -> None:
    outcome, messages = on_ranks(2, _dies_on_rank_0)
    assert outcome == "died" and messages.startswith("RankError")


def _dies_on_rank_0(rank: int) -> Any:
    dist.barrier()  # all ranks have joined
    if rank == 0:
        os._exit(1)
    return Ranks(rank, dist.get_world_size()).gather(rank)
