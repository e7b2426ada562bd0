"""Scenes of one or two flat shapes: what a prompt says, and the true picture of it.

A scene is drawn at random, described in words and rendered at 64x64 pixels. Some pairs of shape and colour
(`HELD_OUT`) are kept away from training, so that a test on them shows that the model combines what it knows.
"""

import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIZE = 64
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (140, 60, 170),
    "orange": (240, 130, 30),
    "white": (245, 245, 245),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
RADII = {"small": 8, "large": 14}
RELATIONS = ("above", "below", "left of", "right of")

# One colour in six for each shape, another one each: every shape and every colour is still seen in training.
HELD_OUT = frozenset(
    {
        ("circle", "red"),
        ("circle", "white"),
        ("square", "green"),
        ("triangle", "blue"),
        ("star", "yellow"),
        ("star", "black"),
        ("cross", "purple"),
        ("diamond", "orange"),
    }
)


@dataclass(frozen=True)
class Thing:
    """One shape of a scene: where its centre is (pixels from the top left) and what it looks like."""

    shape: str
    color: str
    size: str
    x: int
    y: int

    @property
    def phrase(self) -> str:
        return f"a {self.size} {self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """One or two things on a background. With two, `relation` says where the first lies from the second."""

    things: tuple[Thing, ...]
    background: str
    relation: str | None = None

    @property
    def prompt(self) -> str:
        """The full description, every attribute named."""
        return caption(self)

    @property
    def held_out(self) -> bool:
        return any((thing.shape, thing.color) in HELD_OUT for thing in self.things)


def caption(scene: Scene, rng: random.Random | None = None) -> str:
    """Describe a scene. With `rng`, sometimes as people shorten: no size, no background, "to the left of"."""
    drop_size = rng is not None and rng.random() < 0.12
    drop_background = rng is not None and rng.random() < 0.10
    longer = rng is not None and rng.random() < 0.25
    parts = [thing.phrase.replace(f" {thing.size}", "") if drop_size else thing.phrase for thing in scene.things]
    relation = scene.relation
    if longer and relation in ("left of", "right of"):
        relation = f"to the {relation}"
    text = f" {relation} ".join(parts)
    return text if drop_background else f"{text} on a {scene.background} background"


def sample_scene(rng: random.Random, *, held_out: bool = False) -> Scene:
    """Draw a scene: with `held_out`, at least one thing is a pair never trained on, otherwise none is."""
    while True:
        background = rng.choice(list(COLORS))
        relation = rng.choice(RELATIONS) if rng.random() < 2 / 3 else None
        things = tuple(
            Thing(
                shape=rng.choice(SHAPES),
                color=rng.choice([color for color in COLORS if color != background]),
                size=rng.choice(list(RADII)),
                x=x,
                y=y,
            )
            for x, y in _places(rng, relation)
        )
        scene = Scene(things, background, relation)
        if scene.held_out == held_out:
            return scene


def _places(rng: random.Random, relation: str | None) -> list[tuple[int, int]]:
    """Centres for the things of a relation: a quarter of the picture apart along it, loosely placed across it."""
    middle, near, far = SIZE // 2, SIZE // 4, SIZE - SIZE // 4

    def wide() -> int:
        return middle + rng.randint(-4, 4)

    if relation is None:
        return [(wide(), wide())]
    first, second = (near, far) if relation in ("above", "left of") else (far, near)
    along = [first + rng.randint(-1, 1), second + rng.randint(-1, 1)]
    if relation in ("above", "below"):
        return [(wide(), y) for y in along]
    return [(x, wide()) for x in along]


def outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Corners of a shape other than the circle, inside the square of half-width `radius` around (x, y)."""
    if shape == "square":
        corners = [(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)]
    elif shape == "triangle":
        corners = [(0.0, -1.0), (1.0, 1.0), (-1.0, 1.0)]
    elif shape == "diamond":
        corners = [(0.0, -1.0), (1.0, 0.0), (0.0, 1.0), (-1.0, 0.0)]
    elif shape == "star":
        turns = [(k * math.pi / 5, 1.0 if k % 2 == 0 else 0.42) for k in range(10)]
        corners = [(reach * math.sin(turn), -reach * math.cos(turn)) for turn, reach in turns]
    elif shape == "cross":
        arm = 0.36
        quarter = [(-arm, -1.0), (arm, -1.0), (arm, -arm)]
        corners = []
        for _ in range(4):
            corners += quarter
            quarter = [(-v, u) for u, v in quarter]
    else:
        raise ValueError(f"no outline for the shape {shape!r}: expected one of {SHAPES[1:]}")
    return [(x + radius * u, y + radius * v) for u, v in corners]


def draw(scene: Scene, *, oversampling: int = 3) -> Image.Image:
    """Render a scene as an RGB picture of 64x64, smoothed by drawing larger and averaging down."""
    scale = oversampling
    image = Image.new("RGB", (SIZE * scale, SIZE * scale), COLORS[scene.background])
    pen = ImageDraw.Draw(image)
    for thing in scene.things:
        x, y, radius = thing.x * scale, thing.y * scale, RADII[thing.size] * scale
        if thing.shape == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLORS[thing.color])
        else:
            pen.polygon(outline(thing.shape, x, y, radius), fill=COLORS[thing.color])
    return image.resize((SIZE, SIZE), Image.Resampling.BOX)


def doodle(rng: random.Random, *, oversampling: int = 3) -> np.ndarray:
    """A picture of one to three irregular flat patches, bytes (64, 64, 3): no named shape, any colours.

    The autoencoder learns edges and colours from these too, so that it is not tied to the few true shapes.
    """
    side = SIZE * oversampling
    image = Image.new("RGB", (side, side), rng.choice(list(COLORS.values())))
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randint(1, 3)):
        x, y = rng.uniform(0.1, 0.9) * side, rng.uniform(0.1, 0.9) * side
        corners = rng.randint(3, 9)
        turn = rng.uniform(0, 2 * math.pi)
        points = []
        for corner in range(corners):
            angle = turn + 2 * math.pi * (corner + rng.uniform(-0.3, 0.3)) / corners
            reach = rng.uniform(4, 18) * oversampling
            points.append((x + reach * math.sin(angle), y + reach * math.cos(angle)))
        pen.polygon(points, fill=rng.choice(list(COLORS.values())))
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BOX))


def pixels(scenes: list[Scene]) -> np.ndarray:
    """The true pictures of `scenes` as bytes, shape (N, 64, 64, 3)."""
    return np.stack([np.asarray(draw(scene)) for scene in scenes])
