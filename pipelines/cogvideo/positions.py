"""Where the patches of a film lie, for CogVideoX's rotary embeddings."""

import torch

from ...models.layers.rotary import rotary_angles


def rotary_positions(
    grid: tuple[int, int, int],
    trained: tuple[int, int] | None,
    channels: int,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table that the transformer takes as `image_rotary_emb`, for patches frame by frame, row by row.

    Args:
        grid: frames, rows and columns of patches.
        trained: rows and columns of the films that the transformer was trained on: the film is fitted into these, in
            the middle, so that positions stay in the range that it knows. None counts from 0 instead (version 1.5).
        channels: of an attention head: a quarter of them turns with time, three eighths each with row and column.
        device: where the table lies.

    Returns:
        Cosines and sines, each (frames * rows * columns, channels), with every value twice in a row.
    """
    frames, rows, columns = grid
    spans = [(0.0, float(rows)), (0.0, float(columns))] if trained is None else fitted((rows, columns), trained)
    axes = [torch.arange(frames, dtype=torch.float32, device=device)]
    for (start, end), count in zip(spans, (rows, columns), strict=True):
        # Of n patches the last lies at (n - 1) / n of the end's way from 0, also where the first is not at 0.
        axes.append(torch.linspace(start, end * (count - 1) / count, count, device=device))
    positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)
    angles = rotary_angles(positions, (channels // 4, channels // 8 * 3, channels // 8 * 3))
    angles = angles.repeat_interleave(2, dim=-1)
    return angles.cos().float(), angles.sin().float()


def fitted(grid: tuple[int, int], room: tuple[int, int]) -> list[tuple[float, float]]:
    """The largest grid of the same shape that fits into `room`, in its middle: start and end of rows and columns."""
    rows, columns = grid
    if rows * room[1] > room[0] * columns:
        inside = room[0], round(room[0] / rows * columns)
    else:
        inside = round(room[1] / columns * rows), room[1]
    starts = [round((whole - part) / 2) for whole, part in zip(room, inside, strict=True)]
    return [(float(start), float(start + part)) for start, part in zip(starts, inside, strict=True)]
