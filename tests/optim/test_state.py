"""State dicts at any moment: resuming, exchange with torch's optimizers, refusals."""

import copy
import io
import math
import warnings
from typing import Any

import pytest
import torch

from fastsam import FusedSAM
from fastsam.backends import Backend
from fastsam.lab.copied_class import CopiedSAM
from tests.helpers import sam_cases
from tests.helpers.sam_cases import ADAM, SGD, Model, train
from tests.helpers.sam_oracle import copies, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BASES = {**sam_cases.BASES, "amsgrad": (ADAM, {"lr": 0.05, "amsgrad": True})}


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", BASES)
def test_the_format_is_that_of_the_base_optimizer(name: str, backend: Backend) -> None:
    """torch's optimizer loads the state of FusedSAM, and FusedSAM loads torch's."""
    base, options = BASES[name]
    model = Model(torch.float64, backend.device)
    opt = FusedSAM(model.parameters(), base, backend=backend.name, **options)
    train(model, opt, range(2))
    plain_model = copy.deepcopy(model)
    plain = base(plain_model.parameters(), **options)
    plain.load_state_dict(through_a_file(opt.state_dict()))
    for p, q in zip(model.params, plain_model.params):
        assert set(opt.state[p]) == set(plain.state[q])
        for key, value in plain.state[q].items():
            torch.testing.assert_close(value, opt.state[p][key], check_dtype=False, rtol=0, atol=0)
            assert key == "step" or value.stride() == opt.state[p][key].stride() or value.is_contiguous()

    plain_model = copy.deepcopy(model)
    plain = base(plain_model.parameters(), **options)
    for p in plain_model.params:
        p.grad = torch.ones_like(p)
    plain.step()
    new_model = copy.deepcopy(plain_model)
    new_opt = FusedSAM(new_model.parameters(), base, backend=backend.name, rho=0.0, **options)
    new_opt.load_state_dict(through_a_file(plain.state_dict()))
    assert new_opt.param_groups[0]["rho"] == 0.0, "a state dict without rho leaves it"
    for p, q in zip(plain_model.params, new_model.params):
        p.grad, q.grad = torch.full_like(p, 2), torch.full_like(q, 2)
    plain.step()
    new_opt.first_step()
    new_opt.second_step()
    for p, q in zip(plain_model.params, new_model.params):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("dtype", "loaded_dtype"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_loaded_momenta_have_the_dtype_of_the_arithmetic(dtype: torch.dtype, loaded_dtype: torch.dtype) -> None:
    w = torch.nn.Parameter(torch.randn(5, dtype=dtype))
    plain_opt = ADAM([w])
    w.grad = torch.randn_like(w)
    plain_opt.step()
    opt = FusedSAM([w], ADAM)
    opt.load_state_dict(plain_opt.state_dict())
    assert {name: t.dtype for name, t in opt.state[w].items()} == {
        "step": torch.float32, "exp_avg": loaded_dtype, "exp_avg_sq": loaded_dtype
    }  # fmt: skip
    assert same_bits([opt.state[w]["exp_avg"]], [plain_opt.state[w]["exp_avg"].to(loaded_dtype)])


def test_a_state_dict_is_a_copy(backend: Backend) -> None:
    model = Model(torch.float32, backend.device)
    opt = FusedSAM(model.parameters(), SGD, lr=torch.tensor(0.1), momentum=0.9, backend=backend.name)
    train(model, opt, range(2))
    state_dict, weights = opt.state_dict(), copies(model.params)
    reference = copy.deepcopy(state_dict)
    train(model, opt, range(2, 4))
    opt.param_groups[0]["lr"].fill_(0.5)
    new_weights = copies(model.params)
    assert state_dict["param_groups"][0]["lr"].item() == reference["param_groups"][0]["lr"].item() == pytest.approx(0.1)
    for i in reference["state"]:
        assert same_bits([reference["state"][i]["momentum_buffer"]], [state_dict["state"][i]["momentum_buffer"]])
        assert state_dict["state"][i]["momentum_buffer"].untyped_storage().nbytes() <= 4 * 96, "not the whole field"
    with torch.no_grad():
        for p, w in zip(model.params, weights):
            p.copy_(w)
    opt.load_state_dict(state_dict)
    train(model, opt, range(2, 4))
    assert same_bits(new_weights, model.params)
    for i in reference["state"]:
        assert same_bits([reference["state"][i]["momentum_buffer"]], [state_dict["state"][i]["momentum_buffer"]])


def _setter(path: tuple[Any, ...], value: Any) -> Any:
    def spoil(state: dict[str, Any]) -> None:
        node: Any = state
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return spoil


FIELD = ("state", 0, "momentum_buffer")
JUNK: dict[str, tuple[Any, str]] = {
    "another model": (lambda state: state["param_groups"][0]["params"].pop(),
        "another model: its parameter groups have"),
    "other groups": (lambda state: state["param_groups"].append(state["param_groups"][0]),
        "another model: its parameter groups have"),
    "other shapes": (_setter(FIELD, torch.zeros(7)), "another model: momentum_buffer of parameter 0 has shape"),
    "another optimizer": (lambda state: state["param_groups"][0].pop("momentum"),
        "another base optimizer: its parameter groups have no"),
    "not a state dict": (lambda state: state.pop("state"), "no 'state'"),
    "a newer format": (_setter(("fastsam", "format"), 99), "format 99"),
    "nan": (_setter(("param_groups", 0, "rho"), math.nan), "rho"),
    "left out a number": (_setter(("fastsam", "left_out"), 3), "left_out"),
    **{f"left out {bad}": (_setter(("fastsam", "left_out"), [bad]), "left_out") for bad in ("a", 9, -1, True)},
    "state a list": (_setter(("state",), []), "'state' must be a dict, got list"),
    "state none": (_setter(("state",), None), "'state' must be a dict, got NoneType"),
    "groups none": (_setter(("param_groups",), None), "'param_groups' must be a list, got NoneType"),
    "groups a dict": (_setter(("param_groups",), {}), "'param_groups' must be a list, got dict"),
    "a group a number": (_setter(("param_groups", 0), 3), "parameter group 0 must be a dict, got int"),
    "no params": (lambda state: state["param_groups"][0].pop("params"),
        "'params' of parameter group 0 must be a list, got NoneType"),
    "params none": (_setter(("param_groups", 0, "params"), None),
        "'params' of parameter group 0 must be a list, got NoneType"),
    "params twice": (_setter(("param_groups", 0, "params", 1), 0), r"'params' name a parameter twice, got \[0, 0"),
    "params lists": (_setter(("param_groups", 0, "params", 1), []), r"must hold numbers of parameters, got \[\]"),
    "fastsam a list": (_setter(("fastsam",), []), "'fastsam' must be a dict, got list"),
    "perturbed gone": (lambda state: state["fastsam"].pop("perturbed"),
        "'perturbed' of 'fastsam' must be True or False, got NoneType"),
    "perturbed a word": (_setter(("fastsam", "perturbed"), "no"),
        "'perturbed' of 'fastsam' must be True or False, got str"),
    "a count that is none": (_setter(("fastsam", "perturbations"), None),
        "'perturbations' of 'fastsam' must be an integer, got NoneType"),
    "an entry a list": (_setter(("state", 0), [1]), "the state of parameter 0 must be a dict, got list"),
    "an entry none": (_setter(("state", 0), None), "the state of parameter 0 must be a dict, got NoneType"),
    "a word": (_setter(FIELD, "momentum"), "momentum_buffer of parameter 0 must be a tensor, got str"),
    "sparse": (lambda state: _sparse(state, torch.Tensor.to_sparse),
        "momentum_buffer of parameter 0 must be a dense tensor .*to_dense"),
    "complex": (lambda state: _sparse(state, lambda x: x + 1j),
        "momentum_buffer of parameter 0 must be a dense tensor .*complex64"),
    "meta": (lambda state: _sparse(state, lambda x: x.to("meta")), "momentum_buffer of parameter 0 .*meta"),
    "a master that is none": (_setter(("state", 0, "master"), None),
        "master of parameter 0 must be a tensor, got NoneType"),
    "lr a list": (_setter(("param_groups", 0, "lr"), [0.1]), "lr must be a number or a one-element tensor, got list"),
    "momentum a dict": (_setter(("param_groups", 0, "momentum"), {}), "momentum must be a number .*got dict"),
}  # fmt: skip


def _sparse(state: dict[str, Any], make: Any) -> None:
    state["state"][0]["momentum_buffer"] = make(state["state"][0]["momentum_buffer"])


@pytest.mark.parametrize("kind", JUNK)
def test_junk_in_a_state_dict_is_named_and_changes_nothing(kind: str) -> None:
    spoil, words = JUNK[kind]
    model = Model(torch.float32)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, momentum=0.9)
    train(model, opt, range(2))
    junk = opt.state_dict()
    spoil(junk)
    expected, expected_opt = copy.deepcopy((model, opt))
    with pytest.raises((TypeError, ValueError), match=words):
        opt.load_state_dict(junk)
    train(model, opt, range(2, 4))
    train(expected, expected_opt, range(2, 4))
    assert same_bits(model.params, expected.params)


@pytest.mark.parametrize("junk", [None, 3, [], "state"])
def test_what_is_no_state_dict(junk: Any) -> None:
    opt = FusedSAM(Model(torch.float32).parameters(), SGD, lr=0.1)
    with pytest.raises(TypeError, match="state_dict must be a dict such as state_dict.. returns, got"):
        opt.load_state_dict(junk)


@pytest.mark.parametrize("count", ["two", None, torch.zeros(2), [1]], ids=["word", "none", "two", "list"])
def test_a_number_of_steps_that_is_none(count: Any) -> None:
    model = Model(torch.float32)
    opt = FusedSAM(model.parameters(), ADAM, lr=0.1)
    train(model, opt, range(1))
    junk = opt.state_dict()
    junk["state"][0]["step"] = count
    with pytest.raises(ValueError, match="step of parameter 0 must be a number of steps, got"):
        opt.load_state_dict(junk)


def test_state_dict_hooks_fire(backend: Backend) -> None:
    model = Model(torch.float32, backend.device)
    opt = FusedSAM(model.parameters(), SGD, lr=0.1, backend=backend.name)
    calls: list[str] = []
    opt.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    opt.register_state_dict_post_hook(lambda o, s: calls.append("post") or {**s, "extra": sorted(s)})
    state_dict = opt.state_dict()
    assert calls == ["pre", "post"] and state_dict["extra"] == ["fastsam", "param_groups", "state"]
    drop_extra = lambda s: {k: v for k, v in s.items() if k != "extra"}  # noqa: E731
    opt.register_load_state_dict_pre_hook(lambda o, s: calls.append("load") or drop_extra(s))
    opt.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    opt.load_state_dict(state_dict)
    assert calls == ["pre", "post", "load", "loaded"]


def _of_the_copied_class(base: Any, options: dict[str, Any]) -> tuple[Model, CopiedSAM]:
    model = Model(torch.float32)
    sam = CopiedSAM(model.parameters(), base, rho=0.3, **options)
    train(model, sam, range(3))  # type: ignore[arg-type]
    return model, sam


def _load(model: Model, base: Any, options: dict, state_dict: Any) -> tuple[list[Any], Model, FusedSAM]:
    model = copy.deepcopy(model)
    opt = FusedSAM(model.parameters(), base, rho=0.01, **options)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        opt.load_state_dict(through_a_file(state_dict))
    return records, model, opt


UNFUSED = (torch.optim.NAdam, {"lr": 0.05})
STATEFUL = {"sgd": (SGD, {"lr": 0.1, "momentum": 0.9}), "adam": (ADAM, {"lr": 0.05}), "unfused": UNFUSED}


@pytest.mark.parametrize("name", STATEFUL)
def test_the_copied_class_kept_no_momentum_in_its_state_dict_and_loading_it_says_so(name: str) -> None:
    base, options = STATEFUL[name]
    model, sam = _of_the_copied_class(base, options)
    (record,), _, opt = _load(model, base, options, sam.state_dict())
    assert "base_optimizer.state_dict()" in str(record.message) and record.filename == __file__
    assert not any(opt.state.values()), "weights of an old step are no state"
    assert opt.param_groups[0]["rho"] == 0.3, "the options are what they were"


@pytest.mark.parametrize("name", STATEFUL)
def test_the_state_of_the_copied_classes_base_goes_on_as_it_did(name: str) -> None:
    base, options = STATEFUL[name]
    model, sam = _of_the_copied_class(base, options)
    records, new_model, opt = _load(model, base, options, sam.base_optimizer.state_dict())
    assert not records and opt.param_groups[0]["rho"] == 0.3
    train(new_model, opt, range(3, 6))
    train(model, sam, range(3, 6))  # type: ignore[arg-type]
    for p, q in zip(new_model.params, model.params):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("is_merged", [False, True], ids=["a base without state", "a state that was merged"])
def test_nothing_is_said_where_the_copied_class_lost_nothing(is_merged: bool) -> None:
    options = {"lr": 0.1, "momentum": 0.9 if is_merged else 0.0}
    model, sam = _of_the_copied_class(SGD, options)
    state_dict = sam.state_dict()
    if is_merged:
        for i, entry in sam.base_optimizer.state_dict()["state"].items():
            state_dict["state"][i].update(entry)
    records, _, opt = _load(model, SGD, options, state_dict)
    assert not records
    assert {n for entry in opt.state.values() for n in entry} == ({"momentum_buffer"} if is_merged else set())
