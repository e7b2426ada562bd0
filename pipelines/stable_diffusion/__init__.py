"""Stable Diffusion 1 and 2: text to image, image to image and inpainting (Rombach et al. 2022, arXiv 2112.10752).

`base.py` holds what the three share; each pipeline's file reads as its algorithm.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
