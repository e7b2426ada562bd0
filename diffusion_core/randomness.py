"""Random numbers that a seed fixes: one generator for a batch, or one for each of its samples.

Numbers are drawn on the generator's own device and then moved. A CPU generator therefore gives the same picture on
every device, and it is the one to use where a picture must be drawn again elsewhere.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch

Generators: TypeAlias = torch.Generator | list[torch.Generator]


def randn_tensor(
    shape: Sequence[int],
    generator: Generators | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
) -> torch.Tensor:
    """Standard normal numbers.

    Args:
        shape: of the result; the first axis counts samples.
        generator: one for all, or a list with one for each sample. Sample k of a batch drawn from a list equals the
            sample that generator k draws alone. With none, torch's global generator of `device` draws.
        device: where the result lies; the CPU by default.
        dtype: of the result, and of the draw.
        layout: of the result; strided by default.

    Raises:
        ValueError: if a list has another length than the batch, or a generator lives on an accelerator while the
            numbers are wanted elsewhere.
    """
    shape = tuple(shape)
    target = torch.device(device or "cpu")
    options = {"dtype": dtype, "layout": layout or torch.strided}
    check_generator(generator, shape[0] if shape else 1, target)
    if isinstance(generator, list):
        parts = [torch.randn((1, *shape[1:]), generator=one, device=one.device, **options) for one in generator]
        return torch.cat([part.to(target) for part in parts])
    source = target if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=source, **options).to(target)


def check_generator(generator: Generators | None, batch_size: int, device: torch.device | str = "cpu") -> None:
    """Refuse generators that `randn_tensor` cannot use for `batch_size` samples on `device`.

    Raises:
        TypeError: if something in `generator` is not a `torch.Generator`.
        ValueError: as `randn_tensor`.
    """
    if generator is None:
        return
    several = isinstance(generator, list)
    for one in generator if several else [generator]:
        if not isinstance(one, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or a list of them, not {type(one).__name__}")
        if one.device.type not in ("cpu", torch.device(device).type):
            raise ValueError(
                f"a generator on {one.device} cannot draw for {device}: "
                f"pass `torch.Generator('cpu')`, which draws the same numbers for every device"
            )
    if several and len(generator) != batch_size:
        raise ValueError(
            f"generator is a list of {len(generator)}, but {batch_size} samples are drawn: pass one generator for "
            f"each sample (prompts x results for each), or a single one for all"
        )


def seeded_generators(seed: int, count: int, device: torch.device | str = "cpu") -> list[torch.Generator]:
    """Generators for the images of a batch: image k has the seed `seed + k`, and can be drawn again alone."""
    return [torch.Generator(device).manual_seed(seed + index) for index in range(count)]
