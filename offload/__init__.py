"""Where weights live and how they move, for any `torch.nn.Module`; nothing here knows a model by name.

`plan.py` says what a placement is, `strategies.py` makes plans, `engine.py` applies and undoes them.
"""

import lazy_loader  # pyright: ignore[reportMissingTypeStubs]

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # pyright: ignore[reportUnknownVariableType]
