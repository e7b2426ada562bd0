"""FLUX.1 (Black Forest Labs 2024): text to image, image to image, inpainting, filling and editing.

`base.py` holds what they share; each pipeline's file says what it starts from and what its model is shown.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
