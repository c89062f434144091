"""The executor of short federated runs in the tests, and stand-ins for GPUs."""

from tests.helpers.fed_fixtures import a_short_run_is_sequential, gpu, no_cuda

__all__ = ["a_short_run_is_sequential", "gpu", "no_cuda"]
