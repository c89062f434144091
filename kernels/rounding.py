"""Stochastic rounding of `reference`: float32 numbers to half precision, by random bits that are a function of a seed
and a place.

There is no generator and no state, so all backends round to the same bits, in any order of the elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

DROPPED = {torch.float16: 13, torch.bfloat16: 16}  # number of bits by which a float32 is longer
_WORD = 0xFFFFFFFF


def _mix(x: Tensor, key: Tensor | int) -> Tensor:
    """Return a bijection of 32 bits that mixes them well (two multiplications, as in Wellons' "lowbias32"), with a key
    in its middle.

    Arguments and results are int64 tensors of numbers below 2^32. Products wrap, which leaves their low 32 bits right.
    """
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD ^ key
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    return x ^ (x >> 16)


def random_bits(seed: Tensor, places: Tensor) -> Tensor:
    """Return 32 random bits per row and place (modulo 2^32), int64 `[rows, places]`.

    Args:
        seed: int64 `[rows]`.
        places: int64 `[places]`, positions in the row.
    """
    first = _mix(seed & _WORD, 0x9E3779B9)
    second = _mix((seed >> 32) & _WORD ^ first, 0x85EBCA6B)
    return _mix(places & _WORD ^ first[:, None], second[:, None])


def stochastic(y: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    """Round `y` (float32) to one of its two neighbours among the numbers of `dtype`, given 32 random bits.

    The probability of a neighbour is proportional to the distance of the other one, so that the mean is `y`.
    """
    num_bits, size = DROPPED[dtype], y.abs()
    # Subnormal float16 numbers have the unit of the numbers from 2^-14 on.
    offset = torch.where((size < 2.0**-14) & torch.tensor(dtype == torch.float16, device=y.device), 2.0**-14, 0.0)
    bits = (size + offset).view(torch.int32).to(torch.int64) + (random >> (32 - num_bits))
    result = (bits >> num_bits << num_bits).to(torch.int32).view(torch.float32) - offset
    return torch.where(y.isnan(), y, result.copysign(y)).to(dtype)
