"""Qwen-Image: text to image (Wu et al. 2025, 2508.02324)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
