"""Reads a picture back into words by plain pixel analysis, and says whether it is what the prompt asked for.

Every pixel takes the nearest colour of the palette; the background is the commonest colour along the border; what is
left falls into connected pieces, each compared with a template of each shape. No network is involved, so the judge
cannot share a mistake with the model it judges.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image
from scipy import ndimage

from .scenes import COLORS, SHAPES, Scene, Thing, draw

LEAST_PIXELS = 30  # the smallest true thing (a small star) covers 95
BETWEEN_SIZES = 23  # pixels: a small thing is 17 wide, a large one 29
APART = 12  # pixels between two centres along their relation; true scenes have at least 30
TEMPLATE = 40


@dataclass(frozen=True)
class Seen:
    """One thing that the judge found."""

    shape: str
    color: str
    size: str
    x: float
    y: float


@dataclass(frozen=True)
class Reading:
    background: str
    things: tuple[Seen, ...]


def read(image: Image.Image) -> Reading:
    """Find the background and the things of a picture of 64x64 pixels."""
    names = list(COLORS)
    palette = np.array([COLORS[name] for name in names])
    rgb = np.asarray(image.convert("RGB")).astype(int)
    nearest = ((rgb[:, :, None] - palette) ** 2).sum(-1).argmin(-1)
    border = np.concatenate([nearest[0], nearest[-1], nearest[:, 0], nearest[:, -1]])
    background = int(np.bincount(border, minlength=len(names)).argmax())
    things = []
    for color in range(len(names)):
        if color == background:
            continue
        # Opening removes the one-pixel rims where two colours blend into a third; growing back inside the colour
        # returns the thin tips of stars that it took with them.
        mask = nearest == color
        core = ndimage.binary_opening(mask)
        pieces, count = ndimage.label(ndimage.binary_dilation(core, iterations=3, mask=mask))
        for piece in range(1, count + 1):
            where = pieces == piece
            if where.sum() >= LEAST_PIXELS:
                things.append(_describe(where, names[color]))
    return Reading(names[background], tuple(things))


def verdict(image: Image.Image, scene: Scene) -> str:
    """`"ok"`, or the first attribute that is wrong: background, count, relation, color, shape or size."""
    reading = read(image)
    if reading.background != scene.background:
        return "background"
    if len(reading.things) != len(scene.things):
        return "count"
    seen = reading.things
    if scene.relation is not None:
        if _distance(seen[0], seen[1], scene.relation) < 0:
            seen = (seen[1], seen[0])
        if _distance(seen[0], seen[1], scene.relation) < APART:
            return "relation"
    for found, wanted in zip(seen, scene.things, strict=True):
        for attribute in ("color", "shape", "size"):
            if getattr(found, attribute) != getattr(wanted, attribute):
                return attribute
    return "ok"


def _distance(first: Seen, second: Seen, relation: str) -> float:
    """How far `first` lies from `second` in the direction that the relation names, in pixels."""
    return {
        "above": second.y - first.y,
        "below": first.y - second.y,
        "left of": second.x - first.x,
        "right of": first.x - second.x,
    }[relation]


def _describe(where: np.ndarray, color: str) -> Seen:
    ys, xs = np.nonzero(where)
    height, width = np.ptp(ys) + 1, np.ptp(xs) + 1
    box = _fit(where[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1])
    overlap = {name: (box & known).sum() / (box | known).sum() for name, known in _templates().items()}
    size = "small" if max(height, width) < BETWEEN_SIZES else "large"
    return Seen(max(overlap, key=overlap.__getitem__), color, size, float(xs.mean()), float(ys.mean()))


def _fit(mask: np.ndarray) -> np.ndarray:
    image = Image.fromarray(mask.astype(np.uint8) * 255)
    return np.asarray(image.resize((TEMPLATE, TEMPLATE))) > 127


@cache
def _templates() -> dict[str, np.ndarray]:
    templates = {}
    for shape in SHAPES:
        picture = draw(Scene((Thing(shape, "black", "large", 32, 32),), "white"))
        mask = np.asarray(picture)[..., 0] < 128
        ys, xs = np.nonzero(mask)
        templates[shape] = _fit(mask[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1])
    return templates
