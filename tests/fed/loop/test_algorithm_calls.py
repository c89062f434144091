"""The algorithms of fastsam keep to the contract that the algorithms of users are held to."""

import pytest

from fastsam import fed
from fastsam.fed.algorithms.base import has_loop
from fastsam.fed.loop.checked_contract import CheckedContract, contract_of
from fastsam.fed.loop.contract import Contract
from fastsam.fed.loop.personal import PersonalizedAlgorithm
from tests.helpers.fed_runs import FIRST, digest, norm_model, run
from tests.promises import cases


def as_a_users(algorithm: fed.Algorithm) -> fed.Algorithm:
    """Return the same algorithm of a class that is not one of fastsam's, under the same name."""
    cls = type(algorithm)
    users = type(cls.__name__, (cls,), {"__module__": "a_user"})
    result = users.__new__(users)
    result.__dict__.update(algorithm.__dict__)
    return result


@pytest.mark.parametrize("name", fed.algorithms.registry)
def test_checked_calls_give_the_same_bits(name: str) -> None:
    cls = fed.algorithms.registry[name]
    algorithm = cases.make_algorithm(FIRST[cls.__name__]) if cls.__name__ in FIRST else cls()
    checked_algorithm = as_a_users(algorithm)
    assert type(contract_of(algorithm)) is Contract and type(contract_of(checked_algorithm)) is CheckedContract
    options = {"model": norm_model(), "sizes": (8, 16, 8, 12), "batch_size": 4} if name == "fedbn" else {}
    for executor in ["sequential"] if has_loop(algorithm) or cls.own_buffers else ["sequential", "vmap"]:
        assert digest(run(algorithm, executor, 3, **options)) == digest(run(checked_algorithm, executor, 3, **options))


def test_a_wrapped_algorithm_of_a_user_is_checked_too() -> None:
    class Own(fed.FedAvg):
        pass

    for inner, kind in ((Own(), CheckedContract), (fed.FedAvg(), Contract)):
        wrapped_algorithm = PersonalizedAlgorithm.__new__(PersonalizedAlgorithm)
        wrapped_algorithm.inner = inner
        assert type(contract_of(wrapped_algorithm)) is kind  # type: ignore[arg-type]
