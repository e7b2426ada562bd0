"""Schedulers: how a sample moves from noise to data, one file each.

`base.py` holds what they share (noise, thresholding, prediction types), `sigmas.py` the spacings of steps.
"""

import lazy_loader  # pyright: ignore[reportMissingTypeStubs]

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # pyright: ignore[reportUnknownVariableType]
