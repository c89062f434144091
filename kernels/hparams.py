"""The device scalars of a step: one row of `NUM_HPARAMS` float64 numbers per arena row and parameter group.

They are stored in one tensor `hparams` of shape `[rows or 1, groups, NUM_HPARAMS]`. So no kernel needs a host value,
and a captured CUDA graph follows a schedule. `csrc/kernel_math.h` declares the same columns in the same order, and a
test compares the two.
"""

from __future__ import annotations

from enum import IntEnum


class HParam(IntEnum):
    """The columns that all ops share. Columns from `FIRST_RULE_HPARAM` on belong to the update rule (see `rules`)."""

    RHO = 0  # radius of the perturbation; negative when the objective is maximised
    PERTURB_EPS = 1  # added to the norm before the division
    ADAPTIVE = 2  # 1: ASAM, the direction is T^2*g with T = |w| + eta, with the norm of T*g
    ETA = 3
    LR = 4
    DECAY = 5  # weight decay, never clipped
    PROX_MU = 6  # proximal coefficient: phi*w, whose constant half -phi*w^t is in q
    G2_COEF = 7  # weight of the gradient at the perturbed point; -1 when the objective is maximised
    G1_COEF = 8  # weight of the gradient at the unperturbed point (g1)
    CLIP = 9  # largest norm of v; 0 means no clipping
    CLIP_INCLUDES_PROX = 10  # 1: phi*w is inside the clipped norm and scaled with it
    PENALTY = 11  # penalty of the perturbation's sub-problem with a dual (FedSMOO's alpha)
    DECOUPLED = 12  # 1: weight decay shrinks the weights by lr*decay; 0: it is a part of the gradient


FIRST_RULE_HPARAM = 13
NUM_HPARAMS = 17
