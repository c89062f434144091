"""The stand-in for CUDA (`tests/helpers/fake_cuda.py`) notices what it is for: races, replays that differ from their
capture, and misused generators."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.fake_cuda import FakeCuda, FakeGenerator, Watch


def test_the_stand_in_notices_what_it_is_for() -> None:
    cuda, x = FakeCuda(torch.device("cpu")), torch.ones(100)
    stream, number = cuda.stream(), [1.0]
    with Watch():
        y = x + 1
        with cuda.use(stream), pytest.raises(AssertionError, match="reads .* before it is sure to be written"):
            y + 1
        stream.wait_stream(cuda.current())
        with cuda.use(stream):
            z = y + 1
        with pytest.raises(AssertionError, match="writes .* while it may still be read"):
            y.zero_()
        cuda.current().wait_stream(stream)
        y.zero_()
        graph = cuda.capture(lambda: z.add_(y, alpha=number[0]), stream)
        graph.replay()
        graph.replay()
        number[0] = 2.0
        with pytest.raises(AssertionError):
            graph.replay()
        with pytest.raises(AssertionError, match="captured step: the host would wait"):
            cuda.capture(lambda: float(y.sum()), stream).replay()


def test_rows_of_one_memory_are_separate_places() -> None:
    """Streams may work on different rows at once. A window of several rows is ordered with each of them."""
    cuda, rows = FakeCuda(torch.device("cpu")), torch.zeros(4, 100)
    streams = [cuda.stream() for _ in rows]
    with Watch():
        for row, stream in zip(rows, streams, strict=True):
            with cuda.use(stream):
                row.add_(1)
                row[10:20].mul_(2)
        with pytest.raises(AssertionError, match="writes .* before it is sure to be written"):
            rows[1:3].zero_()
        cuda.current().wait_stream(streams[1])
        with pytest.raises(AssertionError, match="reads .* before it is sure to be written"):
            rows[1:3].sum()
        cuda.current().wait_stream(streams[2])
        rows[1:3].zero_()
        with cuda.use(streams[2]), pytest.raises(AssertionError, match="writes"):
            rows[2, 50:].zero_()
        with cuda.use(streams[3]):
            rows[3].zero_()


def draw(offset: int) -> torch.Tensor:
    """Return numbers as a captured pass draws them: at an offset from the offset of the replay."""
    FakeCuda(torch.device("cpu")).set_captured_offset(FakeCuda.default.state.seed, offset)
    return F.dropout(torch.ones(100))


def test_a_replay_draws_at_the_seed_and_offset_of_its_state() -> None:
    cuda, default, results = FakeCuda(torch.device("cpu")), FakeCuda.default, []
    lane = default.clone_state()
    graph = cuda.capture(lambda: results.append(draw(8)), cuda.stream(), None, lane)
    state = default.get_state()
    for seed, offset in ((5, 0), (5, 16), (6, 0)):
        lane.manual_seed(seed), lane.set_offset(offset)
        graph.replay()
        default.manual_seed(seed), default.set_offset(offset + 8)
        assert torch.equal(results.pop(), F.dropout(torch.ones(100)))
    default.set_state(state)
    assert torch.equal(default.get_state(), state)


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda g: g.set_offset(8), "Cannot call CUDAGeneratorImpl::set_offset"),
        (lambda g: g.manual_seed(g.state.seed + 1), "only if new seed is the same"),
    ],
)
def test_generators_refuse_in_a_capture_what_torch_refuses(misuse: object, words: str) -> None:
    cuda = FakeCuda(torch.device("cpu"))
    graph = cuda.capture(lambda: misuse(FakeCuda.default), cuda.stream())  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=words):
        graph.replay()
    FakeCuda.default.set_offset(8)


@pytest.mark.parametrize("shared", [True, False])
def test_two_replays_at_once_need_two_states(shared: bool) -> None:
    """A replay writes the seed and the offset to its state's memory on the device, from which its kernels draw."""
    cuda, default = FakeCuda(torch.device("cpu")), FakeCuda.default
    graphs = []
    lane: FakeGenerator = default.clone_state()
    with Watch():
        for _ in range(2):
            lane = lane if shared else default.clone_state()
            graphs.append((cuda.capture(lambda: draw(0), stream := cuda.stream(), None, lane), stream))

        def replay() -> None:
            for graph, stream in graphs:
                with cuda.use(stream):
                    graph.replay()

        if not shared:
            return replay()
        with pytest.raises(AssertionError, match="(bernoulli_ reads|copy_ writes) .2. before"):
            replay()
