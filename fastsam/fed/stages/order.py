"""The chain of a run: which stages it has, in their order. The only module that knows all stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastsam.fed.algorithms.base import Algorithm
from fastsam.fed.measures import Measures
from fastsam.fed.stages.base import Stage
from fastsam.fed.stages.buffers import AverageBuffers
from fastsam.fed.stages.client_weights import ClientWeights
from fastsam.fed.stages.clip import Clip
from fastsam.fed.stages.compression import Compress
from fastsam.fed.stages.measuring import Measuring
from fastsam.fed.stages.noise import LocalNoise, Noise
from fastsam.fed.stages.optimizer_state import KeepOptimizerState
from fastsam.fed.stages.robust import Robust


def chain(
    algorithm: Algorithm,
    settings: Any,
    measures: Measures | None,
    noise: Noise | None,
    numel: int,
    local: Tensor | None,
) -> Sequence[Stage]:
    """Return the stages of a run with the options `settings` (`fastsam.fed.loop.options.Settings`).

        Clip, LocalNoise                         process_results changes deltas, before `Algorithm.finish`
        AverageBuffers, Compress, ClientWeights  process_uploads changes uploads
        KeepOptimizerState                       process_updates and process_uploads store states of the clients
        Robust                                   process_uploads checks them, after_sum keeps the rows of clients
                                                 without a problem, process_aggregate replaces the means
        Measuring                                process_uploads measures clients, process_aggregate reads true means
        CentralNoise                             process_aggregate adds noise to the sum; it is refused next to Robust

    `noise` is a LocalNoise, a CentralNoise or None. `numel` is the number of all parameters, and `local` a mask
    `[row_size]` of the parameters that stay with the clients, or None. `Stage` describes the hooks.

    Deltas are clipped first. A run with local parameters always has the clip, because the clip knows the norms of
    the uploads. Local noise follows, so everything that leaves a client has noise. Measures come before central noise,
    so they read the true means. A run with noise has no buffers that training changes, so none are averaged.
    """
    is_local, clip, rule = isinstance(noise, LocalNoise), settings.privacy.clip, settings.rule
    sent = numel - (0 if local is None else int(local.sum()))
    name = type(getattr(algorithm, "inner", algorithm)).__name__
    stages: list[Stage | None] = [
        None if clip is None and local is None else Clip(math.inf if clip is None else clip, local),
        noise if is_local else None,
        AverageBuffers() if settings.buffers == "average" and noise is None else None,
        None if settings.compression is None else Compress(settings.compression, sent, name),
        KeepOptimizerState() if settings.optimizer_state == "keep" else None,
        ClientWeights() if getattr(algorithm, "sends_weights", False) else None,
        None if rule is None else Robust(rule, name),
        None if measures is None else Measuring(measures),
        None if is_local else noise,
    ]
    return tuple(stage for stage in stages if stage is not None)
