"""Stable Diffusion 3 and 3.5: text to image, image to image, inpainting (Esser et al. 2024, 2403.03206).

`base.py` holds what the three share; each pipeline's file is its arguments.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
