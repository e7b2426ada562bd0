"""Import paths of the reference that lead nowhere else here: each is a name for modules of this library.

`import diffusion_core` makes them known. Nothing is imported before one of them is.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_HERE = f"{__package__}."

# The reference's module -> ours, in which its names are looked up in this order.
PATHS: dict[str, tuple[str, ...]] = {
    "models.auto_model": ("models.auto",),
    "models.autoencoders.autoencoder_asym_kl": ("models.autoencoders.asymmetric",),
    "models.autoencoders.autoencoder_kl": ("models.autoencoders.kl",),
    "models.autoencoders.autoencoder_tiny": ("models.autoencoders.tiny", "models.autoencoders.outputs"),
    "models.controlnets": ("models.controlnet",),
    "models.controlnets.controlnet": ("models.controlnet",),
    "models.modeling_outputs": ("models.autoencoders.outputs", "models.transformers.outputs"),
    "models.modeling_utils": ("models.base",),
    "models.transformers.auraflow_transformer_2d": ("models.transformers.auraflow",),
    "models.transformers.pixart_transformer_2d": ("models.transformers.pixart",),
    "models.transformers.transformer_flux": ("models.transformers.flux",),
    "models.transformers.transformer_sd3": ("models.transformers.sd3",),
    "pipelines.aura_flow": ("pipelines.auraflow",),
    "pipelines.aura_flow.pipeline_aura_flow": ("pipelines.auraflow",),
    "pipelines.auto_pipeline": ("pipelines.auto",),
    "pipelines.pipeline_utils": ("pipelines.base", "pipelines.ddpm"),
    "pipelines.pixart_alpha": ("pipelines.pixart",),
    "pipelines.pixart_alpha.pipeline_pixart_alpha": ("pipelines.pixart",),
    "pipelines.pixart_alpha.pipeline_pixart_sigma": ("pipelines.pixart",),
    "pipelines.stable_diffusion.safety_checker": ("pipelines.stable_diffusion.safety",),
    "schedulers.scheduling_utils": ("schedulers.base",),
    "utils.export_utils": ("videos",),
    "utils.loading_utils": ("images", "videos"),
    "utils.outputs": ("outputs",),
    "utils.pil_utils": ("images",),
}
_FAMILIES = ("flux", "stable_diffusion", "stable_diffusion_3", "stable_diffusion_xl")
_SCHEDULER = "schedulers.scheduling_"


def modules_for(path: str) -> tuple[str, ...]:
    """The modules of this library that stand for one of the reference's; none if it is not known."""
    if path in PATHS:
        return PATHS[path]
    if path.startswith(_SCHEDULER):
        # The reference gives each scheduler an output class; here they share one.
        return (f"schedulers.{path.removeprefix(_SCHEDULER)}", "schedulers.base")
    for family in _FAMILIES:
        # Every family's package offers its pipelines and their output.
        if path.startswith((f"pipelines.{family}.pipeline_{family}", f"pipelines.{family}.pipeline_output")):
            return (f"pipelines.{family}",)
    return ()


class _Familiar(MetaPathFinder, Loader):
    """Finds those paths, after Python has found nothing under them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = modules_for(fullname.removeprefix(_HERE)) if fullname.startswith(_HERE) else ()
        if not found or not all(_exists(each) for each in found):
            return None
        inside = any(name.startswith(f"{fullname.removeprefix(_HERE)}.") for name in PATHS)
        return ModuleSpec(fullname, self, is_package=inside)

    def exec_module(self, module: ModuleType) -> None:
        path = module.__name__.removeprefix(_HERE)
        sources = [importlib.import_module(_HERE + each) for each in modules_for(path)]
        module.__doc__ = f"A familiar import path for {', '.join(source.__name__ for source in sources)}."

        def look_up(name: str) -> Any:
            if not name.startswith("__"):
                plain = "SchedulerOutput" if name.endswith("SchedulerOutput") else name
                for source in sources:
                    if hasattr(source, plain):
                        return getattr(source, plain)
            raise AttributeError(f"{module.__name__} has no {name!r}, nor have {[each.__name__ for each in sources]}")

        module.__dict__["__getattr__"] = look_up


def _exists(path: str) -> bool:
    try:
        return importlib.util.find_spec(_HERE + path) is not None
    except ModuleNotFoundError:
        return False


def install() -> None:
    """Make the paths known; done twice it is done once."""
    if not any(isinstance(finder, _Familiar) for finder in sys.meta_path):
        sys.meta_path.append(_Familiar())
