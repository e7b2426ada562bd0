"""`place_anew`: a model's placement follows a change of what is said about its modulation."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

from torch import nn

from .engine import apply_plan, execution_device, placement_of
from .plan import Until
from .strategies import Settings, whole

HOISTED = "hoisted modulation"


def place_anew(model: nn.Module) -> None:
    """Plan again where the weights of a model go; see `OffloadMixin.hoist_modulation`.

    Raises:
        PlacementError: if a call is going on.
    """
    placement = placement_of(model)
    wanted = model.__dict__.get("_hoists", False)
    if placement is None:
        if wanted:
            settings = Settings(execution_device(model), home=None, name=HOISTED, remedy="unhoist_modulation()")
            apply_plan(model, whole(settings, until=Until.REMOVED))
    elif placement.plan.name == HOISTED and not wanted:
        placement.remove()
    else:
        with placement._lock:
            placement._refuse_during_calls("plan its modulation anew")
            placement._rebind()
