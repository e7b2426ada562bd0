"""HunyuanVideo: films from text (Kong et al. 2024, arXiv 2412.03603)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
