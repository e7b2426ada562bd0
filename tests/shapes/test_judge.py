"""The judge reads true pictures right and finds what is wrong in wrong ones."""

import dataclasses
import random

import numpy as np
import pytest
from PIL import Image

from benchmarks.shapes.judge import read, verdict
from benchmarks.shapes.scenes import COLORS, RADII, SHAPES, Scene, Thing, draw, sample_scene

OPPOSITE = {"above": "below", "below": "above", "left of": "right of", "right of": "left of"}


def scenes(count: int, seed: int) -> list[Scene]:
    rng = random.Random(seed)
    return [sample_scene(rng, held_out=rng.random() < 0.5) for _ in range(count)]


def another(rng: random.Random, values, *unwanted: str) -> str:
    return rng.choice([value for value in values if value not in unwanted])


def test_true_pictures_are_right():
    assert [verdict(draw(scene), scene) for scene in scenes(600, 0)] == ["ok"] * 600


def test_true_pictures_are_right_with_noise_and_blur():
    from PIL import ImageFilter

    rng = np.random.default_rng(0)
    for scene in scenes(100, 1):
        picture = draw(scene).filter(ImageFilter.GaussianBlur(0.4))
        noisy = np.asarray(picture).astype(float) + rng.normal(0, 6, (64, 64, 3))
        assert verdict(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)), scene) == "ok"


@pytest.mark.parametrize("attribute", ["shape", "color", "size"])
def test_a_wrong_attribute_is_found(attribute: str):
    """The picture differs from the prompt in one attribute of one thing; the judge never calls it right."""
    rng = random.Random(5)
    values = {"shape": SHAPES, "color": list(COLORS), "size": list(RADII)}[attribute]
    for scene in scenes(200, 2):
        place = rng.randrange(len(scene.things))
        thing = scene.things[place]
        unwanted = [getattr(thing, attribute)] + ([scene.background] if attribute == "color" else [])
        changed = dataclasses.replace(thing, **{attribute: another(rng, values, *unwanted)})
        things = tuple(changed if index == place else each for index, each in enumerate(scene.things))
        if len({(each.shape, each.color, each.size) for each in things}) < len(things):
            continue
        assert verdict(draw(dataclasses.replace(scene, things=things)), scene) == attribute


def test_a_wrong_background_is_found():
    rng = random.Random(6)
    for scene in scenes(100, 3):
        taken = [scene.background, *(thing.color for thing in scene.things)]
        wrong = dataclasses.replace(scene, background=another(rng, COLORS, *taken))
        assert verdict(draw(wrong), scene) == "background"


def test_a_wrong_relation_is_found():
    for scene in scenes(300, 4):
        if scene.relation is None:
            continue
        first, second = scene.things
        if dataclasses.replace(first, x=0, y=0) == dataclasses.replace(second, x=0, y=0):
            continue  # two equal things: either may be the first
        swapped = (
            dataclasses.replace(first, x=second.x, y=second.y),
            dataclasses.replace(second, x=first.x, y=first.y),
        )
        assert verdict(draw(dataclasses.replace(scene, things=swapped)), scene) != "ok"
        across = dataclasses.replace(scene, relation="above" if "of" in scene.relation else "left of")
        assert verdict(draw(scene), across) == "relation"


def test_missing_and_extra_things_are_counted():
    for scene in scenes(200, 5):
        extra = Thing("square", next(c for c in COLORS if c != scene.background), "small", 9, 9)
        if len(scene.things) == 2:
            assert verdict(draw(dataclasses.replace(scene, things=scene.things[:1])), scene) == "count"
        else:
            assert verdict(draw(dataclasses.replace(scene, things=(*scene.things, extra))), scene) == "count"


def test_noise_and_plain_pictures_are_not_right():
    rng = np.random.default_rng(1)
    for scene in scenes(50, 6):
        noise = Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
        plain = Image.new("RGB", (64, 64), COLORS[scene.background])
        assert verdict(noise, scene) != "ok"
        assert verdict(plain, scene) == "count"


def test_reading_says_what_is_there():
    scene = Scene((Thing("cross", "green", "large", 20, 40),), "black")
    reading = read(draw(scene))
    (thing,) = reading.things
    assert (reading.background, thing.shape, thing.color, thing.size) == ("black", "cross", "green", "large")
    assert thing.x == pytest.approx(20, abs=1) and thing.y == pytest.approx(40, abs=1)
