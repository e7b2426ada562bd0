"""CogVideoX: films from text, from a first frame and from a film (Yang et al. 2024, arXiv 2408.06072)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
