"""LTX-Video: films from text and from a first frame (HaCohen et al. 2024, arXiv 2501.00103)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
