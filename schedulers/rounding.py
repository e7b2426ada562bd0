"""Float32 arithmetic, rounded step by step.

Weights are worked out in float32 with torch's roots, logarithms and exponentials, which are not quite numpy's, and
products and sums of tensors are rounded one by one. In float64, or fused, they would be a little nearer the truth; but
a run magnifies the last digit, and pictures are to equal those of other libraries.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch


def root(value: Any) -> np.float32:
    """The square root."""
    return _by_torch(torch.sqrt, value)


def log(value: Any) -> np.float32:
    """The natural logarithm; of 0 it is -inf."""
    return _by_torch(torch.log, value)


def exp(value: Any) -> np.float32:
    """e to a power."""
    return _by_torch(torch.exp, value)


def expm1(value: Any) -> np.float32:
    """``e^value - 1``, exact for small values."""
    return _by_torch(torch.expm1, value)


def mixed(*terms: tuple[torch.Tensor, Any]) -> torch.Tensor:
    """The sum of tensors times numbers, a new tensor."""
    (first, weight), *rest = terms
    total = first * float(weight)
    for tensor, weight in rest:
        total = total.add_(tensor * float(weight))
    return total


def _by_torch(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> np.float32:
    # through an array: reading a tensor's value would count as waiting for its device
    return cast(np.float32, function(torch.as_tensor(np.array(value, dtype=np.float32))).numpy()[()])
