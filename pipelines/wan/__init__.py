"""Wan 2.1 and 2.2: films from text, from pictures and from films (Wan Team 2025, arXiv 2503.20314)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
