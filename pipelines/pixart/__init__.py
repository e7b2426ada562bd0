"""PixArt-alpha and PixArt-Sigma: text to image with T5 (Chen et al. 2024, arXiv 2310.00426 and 2403.04692).

`base.py` holds what the two share, `bins.py` the sizes that they were trained on.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
