"""Slicing and tiling: pictures and videos encoded and decoded in parts, so that peak memory stays small.

One implementation serves every autoencoder; a class only declares its numbers, an `Axis` for each direction in which
it can be cut. Everything is counted in whole latents, so the result has exactly the shape of the undivided run
whatever the size, the tile and the overlap. Slicing (one sample at a time) acts before tiling.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch


@dataclass(frozen=True)
class Axis:
    """How one direction is cut. `tile` and `stride` count latents; neighbouring tiles share `tile - stride`.

    Args:
        dim: dimension of the tensors, counted from the end: -1 for width, -2 for height, -3 for frames.
        ratio: pixels or frames to a latent.
        tile: size of a tile.
        stride: distance between the starts of neighbouring tiles, at most `tile`.
        lead: 1 where the first frame is a latent by itself, as in causal video autoencoders. A tile that does not
            start the video then takes one more frame before it, whose result is dropped.
        rounds_up: whether pixels that do not fill a latent make one more (True) or are cut off.
    """

    dim: int
    ratio: int
    tile: int
    stride: int
    lead: int = 0
    rounds_up: bool = False

    def is_larger(self, tensor: torch.Tensor, decode: bool) -> bool:
        """Whether the latents (to decode) or samples (to encode) are larger than one tile."""
        return tensor.shape[self.dim] > self.tile * (1 if decode else self.ratio)

    def latents(self, tensor: torch.Tensor, decode: bool) -> int:
        """How many latents `tensor` has or will have, a lead not counted."""
        size = tensor.shape[self.dim] - self.lead
        if decode:
            return size
        return -(-size // self.ratio) if self.rounds_up else size // self.ratio

    def read(self, tensor: torch.Tensor, start: int, unit: int) -> torch.Tensor:
        """The tile that starts at latent `start` of a tensor with `unit` elements to a latent."""
        begin = start * unit
        length = min(self.tile * unit + self.lead, tensor.shape[self.dim] - begin)
        return tensor.narrow(self.dim, begin, length)

    def resized(self, name: str, size: Any = None, stride: Any = None, overlap: Any = None) -> "Axis":
        """This axis with another tile, given in pixels or frames and rounded down to whole latents.

        A stride that is not given follows from `overlap`, a share of the tile, or keeps its proportion to the tile.

        Raises:
            TypeError: if `size` or `stride` is not an integer, or `overlap` not a number.
            ValueError: if one of them is out of range, or both `stride` and `overlap` are given.
        """
        tile = self.tile if size is None else self._whole(f"tile_sample_min_{name}", size)
        if stride is not None:
            if overlap is not None:
                raise ValueError(f"give tile_sample_stride_{name} or tile_overlap_factor, not both")
            steps = self._whole(f"tile_sample_stride_{name}", stride)
            if steps > tile:
                raise ValueError(
                    f"tile_sample_stride_{name}={stride} is larger than the tile of {tile * self.ratio}: what lies "
                    f"between tiles would be lost. Make the tile larger or the stride smaller"
                )
        elif overlap is not None:
            steps = stride_for(tile, overlap)
        else:
            steps = max(1, tile * self.stride // self.tile)
        return replace(self, tile=tile, stride=steps)

    def _whole(self, argument: str, value: Any) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{argument} must be an integer, not {value!r}")
        value = operator.index(value)
        if value < self.ratio:
            raise ValueError(f"{argument}={value} must be at least {self.ratio}, the size of one latent")
        return value // self.ratio


def stride_for(tile: int, overlap: float) -> int:
    """The stride at which tiles share `overlap` of their size, a number from 0 up to, but without, 1."""
    if isinstance(overlap, bool) or not isinstance(overlap, int | float):
        raise TypeError(f"tile_overlap_factor must be a number, not {overlap!r}")
    if not 0 <= overlap < 1:
        raise ValueError(f"tile_overlap_factor={overlap} must be at least 0 and less than 1")
    return max(1, int(tile * (1 - overlap)))


def image_axes(
    sample_size: int | Sequence[int], ratio: int, overlap: float, rounds_up: bool = False
) -> dict[str, Axis]:
    """Square tiles of `sample_size` pixels, of which neighbours share `overlap`."""
    pixels = sample_size if isinstance(sample_size, int) else sample_size[0]
    tile = max(1, pixels // ratio)
    width = Axis(-1, ratio, tile, stride_for(tile, overlap), rounds_up=rounds_up)
    return {"height": replace(width, dim=-2), "width": width}


def run_tiled(
    function: Callable[..., torch.Tensor],
    main: torch.Tensor,
    beside: Sequence[torch.Tensor],
    axes: Sequence[Axis],
    *,
    decode: bool,
    paste: bool = False,
) -> torch.Tensor:
    """Run `function` over overlapping tiles and join its results, blended linearly where they overlap.

    Args:
        function: encodes or decodes one tile; called as `function(main, *beside)`.
        main: samples to encode, or latents to decode.
        beside: further inputs at the resolution of the samples, cut like them.
        axes: the directions to cut.
        decode: whether `function` goes from latents to samples.
        paste: blend as the tiny autoencoder does; see `_paste`.
    """
    counts = [axis.latents(main, decode) for axis in axes]
    units = [axis.ratio if decode else 1 for axis in axes]
    fade = _Fade(axes, counts, units)
    output: torch.Tensor | None = None
    for corner in product(*(range(0, count, axis.stride) for axis, count in zip(axes, counts, strict=True))):
        inputs = [main, *beside]
        for axis, start in zip(axes, corner, strict=True):
            input_units = [1 if decode else axis.ratio, *(axis.ratio for _ in beside)]
            inputs = [axis.read(tensor, start, unit) for tensor, unit in zip(inputs, input_units, strict=True)]
        part = function(*inputs)
        for axis, start in zip(axes, corner, strict=True):
            if start and axis.lead:
                part = part.narrow(axis.dim, axis.lead, part.shape[axis.dim] - axis.lead)
        if output is None:
            output = _room_for(part, axes, counts, units)
        if paste:
            _paste(output, part, axes, corner, units)
        else:
            _keep(output, fade(part, corner), axes, corner, units)
    assert output is not None, "an axis without a single latent"
    return output


def _room_for(part: torch.Tensor, axes: Sequence[Axis], counts: Sequence[int], units: Sequence[int]) -> torch.Tensor:
    """Zeros for the result, in the dtype, device and memory format of the first tile.

    Not an empty tensor: `_paste` multiplies what is there by 0, which must not be NaN.
    """
    shape = list(part.shape)
    for axis, count, unit in zip(axes, counts, units, strict=True):
        shape[axis.dim] = count * unit + axis.lead
    output = part.new_zeros(shape)
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(part.dim())
    if channels_last and not part.is_contiguous() and part.is_contiguous(memory_format=channels_last):
        output = output.contiguous(memory_format=channels_last)
    return output


def _keep(
    output: torch.Tensor, part: torch.Tensor, axes: Sequence[Axis], corner: Sequence[int], units: Sequence[int]
) -> None:
    """Write the start of a blended tile, up to where the next one begins."""
    room = output
    for axis, start, unit in zip(axes, corner, units, strict=True):
        begin = start * unit + (axis.lead if start else 0)
        length = min(axis.stride * unit + (0 if start else axis.lead), output.shape[axis.dim] - begin)
        room, part = room.narrow(axis.dim, begin, length), part.narrow(axis.dim, 0, length)
    room.copy_(part)


def _paste(
    output: torch.Tensor, part: torch.Tensor, axes: Sequence[Axis], corner: Sequence[int], units: Sequence[int]
) -> None:
    """Lay a whole tile over what is there, fading in over the overlaps; the ramps of the axes are multiplied."""
    room, weight = output, part.new_ones(())
    for axis, start, unit in zip(axes, corner, units, strict=True):
        size = part.shape[axis.dim]
        room = room.narrow(axis.dim, start * unit, size)
        overlap = (axis.tile - axis.stride) * unit
        if start and overlap:
            ramp = torch.arange(size, device=part.device, dtype=torch.float32) / max(overlap - 1, 1)
            weight = weight * _along(ramp.clamp(max=1).to(part.dtype), axis.dim)
    room.copy_(weight * part + (1 - weight) * room if weight.dim() else part)


class _Fade:
    """Blends each tile with the finished neighbours before it, axis by axis, and remembers their far edges."""

    def __init__(self, axes: Sequence[Axis], counts: Sequence[int], units: Sequence[int]) -> None:
        self.axes, self.counts = axes, counts
        self.overlaps = [(axis.tile - axis.stride) * unit for axis, unit in zip(axes, units, strict=True)]
        self.edges: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, part: torch.Tensor, corner: tuple[int, ...]) -> torch.Tensor:
        # The edge that a tile left along an axis is found by its position along the others.
        keys = [(index, *corner[:index], *corner[index + 1 :]) for index in range(len(corner))]
        for key, axis in zip(keys, self.axes, strict=True):
            edge = self.edges.pop(key, None)
            if edge is not None:
                part = _blend(edge, part, axis.dim)
        for index, axis in enumerate(self.axes):
            size = min(self.overlaps[index], part.shape[axis.dim])
            if size and corner[index] + axis.stride < self.counts[index]:
                # A copy, so that the rest of the tile can be freed.
                self.edges[keys[index]] = part.narrow(axis.dim, part.shape[axis.dim] - size, size).clone()
        return part


def _blend(edge: torch.Tensor, part: torch.Tensor, dim: int) -> torch.Tensor:
    """Fade from the end of `edge` into the start of `part`. Both end at the same place where a tile is cut short."""
    size = min(edge.shape[dim], part.shape[dim])
    weight = _along(torch.arange(size, device=part.device, dtype=torch.float32).div(size).to(part.dtype), dim)
    before = edge.narrow(dim, edge.shape[dim] - size, size)
    blended = before * (1 - weight) + part.narrow(dim, 0, size) * weight
    return torch.cat([blended, part.narrow(dim, size, part.shape[dim] - size)], dim)


def _along(values: torch.Tensor, dim: int) -> torch.Tensor:
    """A vector shaped to broadcast along `dim`, which is counted from the end."""
    return values.reshape(-1, *(1 for _ in range(-dim - 1)))


def _number(axis: str, argument: str, field: str) -> property:
    """A number of one axis as an attribute, in pixels or frames; setting it is checked as in `enable_tiling`."""

    def read(self: "TilingMixin") -> int:
        if axis not in self._axes:
            raise AttributeError(f"{type(self).__name__} has no {axis} to cut")
        return getattr(self._axes[axis], field) * self._axes[axis].ratio

    def write(self: "TilingMixin", value: int) -> None:
        self._set_tiles(**{f"{argument}_{axis}": value})

    return property(read, write)


class TilingMixin:
    """`enable_slicing` and `enable_tiling` for autoencoders.

    A class calls `_declare_tiles` in its constructor, and `_in_parts` to encode and to decode.

    `use_framewise_encoding` and `use_framewise_decoding` cut films in time, with `use_tiling` or without. They follow
    from `enable_tiling` where it names frames, and may be set.
    """

    use_slicing: bool
    use_tiling: bool
    use_framewise_encoding: bool
    use_framewise_decoding: bool
    _framewise: bool
    _axes: dict[str, Axis]
    _paste_tiles = False

    tile_sample_min_height = _number("height", "tile_sample_min", "tile")
    tile_sample_min_width = _number("width", "tile_sample_min", "tile")
    tile_sample_min_num_frames = _number("num_frames", "tile_sample_min", "tile")
    tile_sample_stride_height = _number("height", "tile_sample_stride", "stride")
    tile_sample_stride_width = _number("width", "tile_sample_stride", "stride")
    tile_sample_stride_num_frames = _number("num_frames", "tile_sample_stride", "stride")

    @property
    def tile_sample_min_size(self) -> int:
        """Height of a tile in pixels; set it for square tiles."""
        return self.tile_sample_min_height

    @tile_sample_min_size.setter
    def tile_sample_min_size(self, value: int) -> None:
        self._set_tiles(tile_sample_min_height=value, tile_sample_min_width=value)

    @property
    def tile_latent_min_size(self) -> int:
        """Height of a tile in latents; set it for square tiles."""
        return self._axes["height"].tile

    @tile_latent_min_size.setter
    def tile_latent_min_size(self, value: int) -> None:
        self.tile_sample_min_size = value * self._axes["height"].ratio

    @property
    def tile_overlap_factor(self) -> float:
        """The share of a tile's height that its neighbour covers too; set it for both directions."""
        return 1 - self._axes["height"].stride / self._axes["height"].tile

    @tile_overlap_factor.setter
    def tile_overlap_factor(self, value: float) -> None:
        self._set_tiles(tile_overlap_factor=value)

    def enable_slicing(self) -> None:
        """Encode and decode a batch one sample at a time. Results stay the same."""
        self.use_slicing = True

    def disable_slicing(self) -> None:
        """Encode and decode a batch at once again."""
        self.use_slicing = False

    def enable_tiling(
        self,
        tile_sample_min_height: int | None = None,
        tile_sample_min_width: int | None = None,
        tile_sample_stride_height: int | None = None,
        tile_sample_stride_width: int | None = None,
        tile_sample_min_num_frames: int | None = None,
        tile_sample_stride_num_frames: int | None = None,
        tile_overlap_factor: float | None = None,
        tile_overlap_factor_height: float | None = None,
        tile_overlap_factor_width: float | None = None,
    ) -> None:
        """Encode and decode what is larger than a tile in overlapping tiles, blended linearly.

        Results have the shape of the undivided run. They differ a little from it, since a tile does not see what
        lies outside. Numbers that are not given stay as they are; at first they are the reference's. A stride that is
        not given keeps its proportion to the tile. Sizes that are no multiple of the compression ratio are rounded
        down to one.

        Args:
            tile_sample_min_height: height of a tile in pixels of the picture; smaller pictures are not cut.
            tile_sample_min_width: width of a tile in pixels.
            tile_sample_stride_height: pixels from one tile's start to the next; the rest of the tile overlaps.
            tile_sample_stride_width: the same to the right.
            tile_sample_min_num_frames: frames of a tile, for video autoencoders. Most cut films in time only where this
                or the next is given.
            tile_sample_stride_num_frames: frames from one tile's start to the next.
            tile_overlap_factor: in place of strides, the share of a tile that overlaps its neighbour, in [0, 1).
            tile_overlap_factor_height, tile_overlap_factor_width: the same for one direction.

        Raises:
            TypeError: if a size is not an integer.
            ValueError: if a size is smaller than a latent, a stride larger than its tile, the overlap not in [0, 1),
                or frames are named for an autoencoder of pictures. Nothing is changed then.
        """
        self._set_tiles(
            tile_sample_min_height=tile_sample_min_height,
            tile_sample_min_width=tile_sample_min_width,
            tile_sample_stride_height=tile_sample_stride_height,
            tile_sample_stride_width=tile_sample_stride_width,
            tile_sample_min_num_frames=tile_sample_min_num_frames,
            tile_sample_stride_num_frames=tile_sample_stride_num_frames,
            tile_overlap_factor=tile_overlap_factor,
            tile_overlap_factor_height=tile_overlap_factor_height,
            tile_overlap_factor_width=tile_overlap_factor_width,
        )
        self.use_tiling = True
        if tile_sample_min_num_frames is not None or tile_sample_stride_num_frames is not None:
            self.use_framewise_encoding = self.use_framewise_decoding = True

    def disable_tiling(self) -> None:
        """Encode and decode whole again what was whole at first. The sizes of the tiles are remembered."""
        self.use_tiling = False
        self.use_framewise_encoding = self.use_framewise_decoding = self._framewise

    def _declare_tiles(self, axes: dict[str, Axis], framewise: bool = False) -> None:
        """Say the directions that can be cut, "height", "width" and "num_frames", and their default numbers.

        With `framewise`, films are cut in time without being asked for.
        """
        self._axes, self._framewise = axes, framewise
        self.use_slicing = self.use_tiling = False
        self.use_framewise_encoding = self.use_framewise_decoding = framewise

    def _set_tiles(self, tile_overlap_factor: float | None = None, **numbers: float | None) -> None:
        """Take new numbers, named as in `enable_tiling`: all of them, or none where one is wrong."""
        axes = {}
        for name, axis in self._axes.items():
            size, stride = numbers.pop(f"tile_sample_min_{name}", None), numbers.pop(f"tile_sample_stride_{name}", None)
            # Frames overlap by a number of frames; the factor is about the picture.
            both = None if name == "num_frames" else tile_overlap_factor
            overlap = numbers.pop(f"tile_overlap_factor_{name}", None)
            overlap = both if overlap is None else overlap
            axes[name] = axis.resized(name, size, stride, overlap)
        foreign = [name for name, value in numbers.items() if value is not None]
        if foreign:
            raise ValueError(f"{type(self).__name__} cuts {sorted(self._axes)} and has no use for {foreign}")
        self._axes = axes

    def _in_parts(
        self,
        function: Callable[..., torch.Tensor],
        main: torch.Tensor,
        *beside: torch.Tensor,
        decode: bool,
    ) -> torch.Tensor:
        """`function(main, *beside)`, by samples and by tiles where these are enabled; see `run_tiled`."""
        if self.use_slicing and main.shape[0] > 1:
            samples = zip(*(tensor.split(1) for tensor in (main, *beside)), strict=True)
            return torch.cat([self._in_tiles(function, *sample, decode=decode) for sample in samples])
        return self._in_tiles(function, main, *beside, decode=decode)

    def _in_tiles(
        self, function: Callable[..., torch.Tensor], main: torch.Tensor, *beside: torch.Tensor, decode: bool
    ) -> torch.Tensor:
        picture = [axis for name, axis in self._axes.items() if name != "num_frames"] if self.use_tiling else []
        in_time = self.use_framewise_decoding if decode else self.use_framewise_encoding
        frames = self._axes.get("num_frames") if in_time else None

        def by_picture(main: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
            if not any(axis.is_larger(main, decode) for axis in picture):
                return function(main, *beside)
            return run_tiled(function, main, beside, picture, decode=decode, paste=self._paste_tiles)

        if frames is None or not frames.is_larger(main, decode):
            return by_picture(main, *beside)
        return run_tiled(by_picture, main, beside, [frames], decode=decode)
