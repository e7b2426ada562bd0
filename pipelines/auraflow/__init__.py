"""AuraFlow: text to image with a rectified flow (fal.ai 2024)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
