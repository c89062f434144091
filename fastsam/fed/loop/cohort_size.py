"""A warning about rounds that have one client."""

from __future__ import annotations

import logging

from fastsam.fed.algorithms.base import Algorithm
from fastsam.fed.clients.sampling import fixed_size
from fastsam.fed.loop.options import Settings

log = logging.getLogger("fastsam.fed")


def warn_of_small_rounds(algorithm: Algorithm, settings: Settings, clients: int) -> None:
    """Warn if the participation of several clients rounds to one, because a mean over one client is not federated.

    `cohort=1` says so, and a sampler of the user or a training on pooled data has no participation.
    """
    is_share = settings.cohort is None and isinstance(settings.sampler, str) and clients > 1
    if not is_share or getattr(algorithm, "pools_data", False) or fixed_size(settings.participation, clients) > 1:
        return
    log.warning(
        "participation=%g of %d clients is about one client in a round. Pass cohort=2 or more, or a larger "
        "participation; cohort=1 ends this warning",
        settings.participation, clients,
    )  # fmt: skip
