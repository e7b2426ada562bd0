"""Pipelines: from a prompt to a picture or a film, each read as the algorithm of its paper.

`base.py` loads, saves and places; `text.py`, `guidance.py` and `latents.py` hold what families share.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
