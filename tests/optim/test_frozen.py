"""Parameters that need no gradient cost nothing, and join with fresh state when they have their first one."""

import gc

import pytest
import torch
from torch import Tensor, nn

from fastsam import GSAM, MSAM, SAM, FusedSAM
from fastsam.backends import Backend
from tests.helpers.sam_cases import BASES, SGD
from tests.helpers.sam_oracle import backward, copies, make_parameters, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SHAPES = [(5, 3), (8,), (4, 2, 3)]


class AdapterModel(nn.Module):
    """A frozen layer with many weights, and a trained layer with a hundredth of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(300, 300, bias=False, dtype=dtype).requires_grad_(False)
        self.adapter = nn.Linear(300, 3, bias=False, dtype=dtype)
        self.late = nn.Linear(300, 300, bias=False, dtype=dtype).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.late(x) + self.adapter(x).sum(1, keepdim=True)


def step(model: nn.Module, opt: FusedSAM, number: int) -> None:
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(number)).to(next(model.parameters()).dtype)

    def closure() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    opt.step(closure)


def tensor_bytes() -> int:
    """Return the bytes of all live tensors."""
    gc.collect()
    storages = {
        storage.data_ptr(): storage.nbytes()
        for t in gc.get_objects()
        if type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and t.device.type == "cpu"
        for storage in (t.untyped_storage(),)
    }
    return sum(storages.values())


@pytest.mark.parametrize(
    ("base", "dtype", "sam", "case"),
    [
        ("adamw", torch.bfloat16, GSAM(), 14),
        pytest.param("sgd", torch.float32, SAM(), 8, marks=pytest.mark.slow),
        pytest.param("adamw", torch.float32, SAM(), 12, marks=pytest.mark.slow),
        pytest.param("sgd", torch.float32, MSAM(), 8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_frozen_parameters_take_no_memory(base: str, dtype: torch.dtype, sam: SAM, case: int) -> None:
    """`each`: bytes per parameter that is trained (docs/memory.md)."""
    model, (cls, options) = AdapterModel(dtype), BASES[base]
    old_bytes = tensor_bytes()
    opt = FusedSAM(model.parameters(), cls, variant=sam, **options)
    step(model, opt, 0)
    opt.zero_grad()
    trainable_size = model.adapter.weight.numel()
    assert tensor_bytes() - old_bytes < (case + 2) * trainable_size + 4096, "padding and options are small"
    assert model.base.weight.numel() + model.late.weight.numel() > 99 * trainable_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BASES)
def test_a_checkpoint_has_no_line_for_them(name: str, dtype: torch.dtype) -> None:
    model, (base, options) = AdapterModel(dtype), BASES[name]
    opt = FusedSAM(model.parameters(), base, **options)
    step(model, opt, 0)
    assert list(opt.state) == [model.adapter.weight]
    state_dict = opt.state_dict()
    assert list(state_dict["state"]) == [1] and state_dict["fastsam"]["left_out"] == [0, 2]
    plain = base(AdapterModel(dtype).parameters(), **options)
    plain.load_state_dict(state_dict)
    assert len(plain.state) == 1


def test_no_kernel_reads_or_writes_them(backend: Backend) -> None:
    """Their memory may even be given away between two steps, as offloading libraries do."""
    params = make_parameters(SHAPES, torch.float32, backend.device)
    frozen_param = params[1].requires_grad_(False)
    opt = FusedSAM(params, SGD, lr=0.1, momentum=0.9, backend=backend.name)
    trainable_params, memory = [params[0], params[2]], frozen_param.untyped_storage()
    size = memory.nbytes()
    try:
        for number in range(3):
            for move in (opt.first_step, opt.second_step):
                backward(trainable_params, number)
                memory.resize_(size if number == 0 else 0)
                move()
    finally:
        memory.resize_(size)  # a failure is shown with its values
    assert frozen_param._version == 0


def train(start: tuple[int, int], freezes: bool = True) -> tuple[list[nn.Parameter], FusedSAM]:
    """Take six steps. The second parameter has no gradient before the backward pass `start` (step, pass). Until then it
    is frozen, or needs one."""
    params = make_parameters(SHAPES, torch.float32)
    opt = FusedSAM(params, SGD, rho=0.2, **BASES["sgd"][1])
    for number in range(6):
        for half, move in enumerate((opt.first_step, opt.second_step)):
            is_late = (number, half) < start
            params[1].requires_grad_(not (is_late and freezes))
            backward(params, number)
            if is_late:
                params[1].grad = None
            move()
    return params, opt


def test_it_may_join_in_the_second_pass() -> None:
    """It was not perturbed then, and is updated from where it is."""
    params, opt = train((3, 1))
    assert len(opt.state) == 3 and opt._engine.uninitialized_numbers() == []
    assert same_bits(params, train((3, 1), freezes=False)[0])


def test_a_parameter_that_joins_in_the_second_pass_leaves_the_norm_of_the_first() -> None:
    params = make_parameters(SHAPES, torch.float32)
    params[1].requires_grad_(False)
    opt = FusedSAM(params, SGD, lr=0.1, rho=0.2)
    backward(params, 0)
    opt.first_step()
    norm = opt.grad_norm
    params[1].requires_grad_(True)
    backward(params, 0)
    opt.second_step()
    assert norm is not None and opt.grad_norm == norm > 0


def test_a_parameter_that_is_frozen_again_keeps_its_state_and_stays() -> None:
    params, opt = train((3, 0))
    momentum = opt.state[params[1]]["momentum_buffer"].clone()
    params[1].requires_grad_(False)
    old_weights = copies(params)
    for move in (opt.first_step, opt.second_step):
        backward(params, 6)
        assert params[1].grad is None
        move()
    assert [torch.equal(p, q) for p, q in zip(params, old_weights, strict=True)] == [False, True, False]
    assert torch.equal(opt.state[params[1]]["momentum_buffer"], momentum)
    new = make_parameters([(2,)], torch.float32)
    opt.add_param_group({"params": new})  # new buffers
    params[1].requires_grad_(True)
    for move in (opt.first_step, opt.second_step):
        backward(params, 7)
        move()
    assert not torch.equal(params[1], old_weights[1])


def test_a_frozen_parameter_with_a_gradient_joins_after_steady_steps() -> None:
    params = make_parameters(SHAPES, torch.float32)
    params[0].requires_grad_(False)
    opt = FusedSAM(params, SGD, lr=0.1)
    for number in range(3):
        for move in (opt.first_step, opt.second_step):
            backward(params, number)
            move()
    params[0].grad = torch.ones_like(params[0])
    old_weights = params[0].detach().clone()
    opt.first_step()
    assert not torch.equal(params[0], old_weights)
    opt.restore()
    assert torch.equal(params[0], old_weights)
