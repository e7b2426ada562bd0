"""`OffloadMixin`: the memory and speed methods that every model inherits."""


class OffloadMixin:
    """Methods for any `torch.nn.Module` class; see the memory guide."""
