"""ControlNet for Stable Diffusion and Stable Diffusion XL (Zhang et al. 2023, arXiv 2302.05543).

`control.py` holds all that steering by a picture adds to a pipeline; the other files are arguments.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
