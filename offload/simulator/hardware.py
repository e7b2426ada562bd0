"""What the clock knows about devices: a small table of speeds and sizes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Speeds of a device and of its link to the host.

    The peaks are those of the makers' data sheets (dense, accumulating in float32). What programs reach is less, so
    the clock takes `efficiency` of every peak. The launch time and the pageable speed are round assumptions: read
    predicted times as comparisons between plans, not as benchmarks.

    Args:
        name: key in `HARDWARE`.
        half_flops: peak for float16 and bfloat16, operations a second.
        single_flops: peak for float32, operations a second.
        memory_bandwidth: of the device's own memory, bytes a second.
        pinned_bandwidth: host to device or back with pinned host memory, bytes a second.
        pageable_bandwidth: the same with ordinary host memory.
        peer_bandwidth: device to device, bytes a second.
        launch: host time to launch one kernel or copy, seconds.
        memory: bytes of device memory.
        efficiency: the share of the computing and memory peaks that is reached, in (0, 1].
    """

    name: str
    half_flops: float
    single_flops: float
    memory_bandwidth: float
    pinned_bandwidth: float
    pageable_bandwidth: float
    peer_bandwidth: float
    launch: float
    memory: int
    efficiency: float = 0.6


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware("generic", 100e12, 25e12, 800e9, 24e9, 8e9, 24e9, 6e-6, 16 * 2**30),
        Hardware("rtx-3060", 25.5e12, 12.7e12, 360e9, 24e9, 8e9, 24e9, 6e-6, 12 * 2**30),
        Hardware("rtx-4090", 165e12, 82.6e12, 1008e9, 24e9, 8e9, 24e9, 6e-6, 24 * 2**30),
        Hardware("h100", 989e12, 67e12, 3350e9, 50e9, 10e9, 300e9, 6e-6, 80 * 2**30),
    )
}


def get_hardware(hardware: str | Hardware) -> Hardware:
    """The entry of a name, or the given object.

    Raises:
        ValueError: the name is not in `HARDWARE`.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware not in HARDWARE:
        raise ValueError(
            f"`hardware` is {hardware!r}; it must be a `Hardware` or one of {', '.join(sorted(HARDWARE))}."
        )
    return HARDWARE[hardware]
