"""Stable Diffusion XL, base and refiner: text to image, image to image, inpainting (Podell et al. 2023, 2307.01952).

`base.py` holds what the three share; each pipeline's file is its arguments.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
