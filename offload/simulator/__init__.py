"""A simulated accelerator: devices `sim:0` ... over the memory of the CPU, for tests and for planning.

`simulator()` opens it. Real values, bit for bit those of the CPU; caps, streams, pinned memory and copies as on a GPU;
a race detector; a clock; a dry mode for models larger than the machine. It needs torch 2.13 and a process of its own.
Importing this package changes nothing; the first `with simulator(...)` registers the device type.
"""

from diffusion_core.errors import RaceError

from .backend import unavailable
from .clock import Span
from .faults import inject
from .hardware import HARDWARE, Hardware
from .races import Race
from .session import Simulator, Statistics, simulator
from .streams import Event, Stream

__all__ = [
    "HARDWARE",
    "Event",
    "Hardware",
    "Race",
    "RaceError",
    "Simulator",
    "Span",
    "Statistics",
    "Stream",
    "inject",
    "simulator",
    "unavailable",
]
