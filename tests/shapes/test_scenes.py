"""The scenes that the embedded model learns from: what is said is what is drawn, and what is held out stays out."""

import random

import numpy as np
import pytest

from benchmarks.shapes.scenes import (
    COLORS,
    HELD_OUT,
    RADII,
    RELATIONS,
    SHAPES,
    SIZE,
    Scene,
    Thing,
    caption,
    doodle,
    draw,
    outline,
    pixels,
    sample_scene,
)


def test_training_never_sees_a_held_out_pair_and_the_test_always_does():
    rng = random.Random(0)
    for held_out in (False, True):
        for _ in range(500):
            scene = sample_scene(rng, held_out=held_out)
            pairs = {(thing.shape, thing.color) for thing in scene.things}
            assert bool(pairs & HELD_OUT) == held_out


def test_every_shape_and_color_is_still_seen_in_training():
    seen = {(shape, color) for shape in SHAPES for color in COLORS} - HELD_OUT
    assert {shape for shape, _ in seen} == set(SHAPES)
    assert {color for _, color in seen} == set(COLORS)
    assert {shape for shape, _ in HELD_OUT} == set(SHAPES)


def test_prompt_names_every_attribute():
    things = (Thing("circle", "red", "small", 32, 16), Thing("square", "blue", "large", 32, 48))
    scene = Scene(things, "yellow", "above")
    assert scene.prompt == "a small red circle above a large blue square on a yellow background"


def test_captions_shorten_as_people_do():
    scene = Scene((Thing("star", "red", "small", 16, 32), Thing("cross", "blue", "large", 48, 32)), "white", "left of")
    rng = random.Random(1)
    texts = {caption(scene, rng) for _ in range(300)}
    assert any("small" not in text for text in texts)
    assert any("background" not in text for text in texts)
    assert any("to the left of" in text for text in texts)
    assert scene.prompt in texts


@pytest.mark.parametrize("relation", RELATIONS)
def test_relations_place_the_first_thing_rightly(relation: str):
    rng = random.Random(2)
    scenes = [scene for scene in (sample_scene(rng) for _ in range(300)) if scene.relation == relation]
    assert len(scenes) > 20
    for first, second in (scene.things for scene in scenes):
        away = {
            "above": second.y - first.y,
            "below": first.y - second.y,
            "left of": second.x - first.x,
            "right of": first.x - second.x,
        }[relation]
        assert away >= 30


def test_pictures_have_the_named_colors_in_the_named_places():
    scene = Scene(
        (Thing("circle", "red", "small", 32, 16), Thing("square", "blue", "large", 32, 48)), "yellow", "above"
    )
    picture = np.asarray(draw(scene))
    assert picture.shape == (SIZE, SIZE, 3)
    assert tuple(picture[16, 32]) == COLORS["red"]
    assert tuple(picture[48, 32]) == COLORS["blue"]
    assert tuple(picture[0, 0]) == COLORS["yellow"]


def test_things_lie_inside_the_picture():
    rng = random.Random(3)
    for _ in range(300):
        for thing in sample_scene(rng).things:
            radius = RADII[thing.size]
            assert radius <= thing.x <= SIZE - radius and radius <= thing.y <= SIZE - radius


def test_outlines_fill_their_square_and_unknown_shapes_are_refused():
    for shape in SHAPES[1:]:
        corners = np.array(outline(shape, 0, 0, 1))
        assert np.abs(corners).max() == pytest.approx(1)
    with pytest.raises(ValueError, match="hexagon"):
        outline("hexagon", 0, 0, 1)


def test_batches_and_doodles_are_bytes():
    rng = random.Random(4)
    assert pixels([sample_scene(rng) for _ in range(3)]).shape == (3, SIZE, SIZE, 3)
    picture = doodle(rng)
    assert picture.shape == (SIZE, SIZE, 3) and picture.dtype == np.uint8 and picture.std() > 0
