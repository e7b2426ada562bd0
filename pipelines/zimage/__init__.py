"""Z-Image: text to image (Z-Image team 2025, 2511.22699)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
