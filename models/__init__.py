"""Model classes, each a short story about one device: embed, blocks, project.

`base.py` holds what all models share, `layers/` what some share; the rest is a folder for each kind of model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
