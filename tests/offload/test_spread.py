"""Spreading parts over devices: the best by search, in order, and split into units."""

import itertools
import random

import pytest

from diffusion_core.offload.spread import assign, fill_in_order, split, spread

GIB = 2**30


def quality(places, sizes, budgets, reserves):
    """Bytes without a device, and the largest share of a budget that is taken; None if something is over its budget."""
    shares = []
    for device, budget in budgets.items():
        here = [name for name, place in places.items() if place == device]
        if here:
            need = sum(sizes[name] for name in here) + max(reserves.get(name, 0) for name in here)
            if need > budget:
                return None
            shares.append(need / budget)
    return sum(sizes[name] for name, place in places.items() if place is None), max(shares, default=0.0)


def brute_force(sizes, budgets, reserves):
    every = itertools.product([*budgets, None], repeat=len(sizes))
    found = (quality(dict(zip(sizes, choice, strict=True)), sizes, budgets, reserves) for choice in every)
    return min(each for each in found if each is not None)


@pytest.mark.parametrize("reserved", [False, True])
def test_five_parts_over_unequal_devices_land_where_a_brute_force_search_says(reserved):
    draw = random.Random(5)
    for _ in range(1000):
        sizes = {name: draw.randint(1, 30) for name in "abcde"}
        budgets = {index: draw.randint(1, 60) for index in range(draw.randint(1, 3))}
        reserves = {name: draw.randint(0, 10) for name in sizes} if reserved else {}
        places = assign(sizes, budgets, reserves)
        assert quality(places, sizes, budgets, reserves) == brute_force(sizes, budgets, reserves)


def test_a_part_that_does_not_fit_the_first_device_goes_to_another():
    # The reference sends "b" to the cpu here, and loses it in the second case.
    assert assign({"a": 10, "b": 9, "c": 1}, {0: 20, 1: 5}) == {"a": 0, "b": 0, "c": 1}
    assert None not in assign({"a": 10, "b": 9, "c": 8, "d": 1}, {0: 40, 1: 5}).values()


def test_many_parts_end_in_time():
    draw = random.Random(2)
    sizes = {f"part{index}": draw.randint(1, 10**10) for index in range(14)}
    places = assign(sizes, dict.fromkeys(range(8), 12 * 10**9))
    assert sum(sizes[name] for name, place in places.items() if place is None) == 0


def test_a_device_without_budget_is_not_used():
    assert assign({"a": 1}, {0: 0}) == {"a": None}
    assert spread({"a": [1, 2]}, {0: 0}) == {"a": [None, None]}
    assert spread({"a": [1, 2]}, {}) == {"a": [None, None]}


def test_in_order_each_part_goes_to_the_first_device_with_room():
    sizes = {"text": 3, "unet": 8, "vae": 2}
    assert fill_in_order(["text", "unet", "vae"], sizes, {0: 10, 1: 9}) == {"text": 0, "unet": 1, "vae": 0}
    assert fill_in_order(["unet", "text", "vae"], sizes, {0: 10, 1: 9}) == {"unet": 0, "text": 1, "vae": 0}
    assert fill_in_order(["text", "unet", "vae"], sizes, {0: 10}) == {"text": 0, "unet": None, "vae": 0}


def test_reserves_count_once_a_device():
    reserves = {"a": 4, "b": 4}
    assert fill_in_order(["a", "b"], {"a": 3, "b": 3}, {0: 10}, reserves) == {"a": 0, "b": 0}
    assert fill_in_order(["a", "b"], {"a": 3, "b": 3}, {0: 9}, reserves) == {"a": 0, "b": None}


def test_units_are_split_in_runs():
    assert split([4, 4, 4, 4], {0: 8, 1: 20}) == [0, 0, 1, 1]
    assert split([4, 4, 4, 4], {0: 20, 1: 20}) == [0, 0, 0, 0]
    assert split([4, 4, 4, 4], {0: 20, 1: 20}, even=True) == [0, 0, 1, 1]
    assert split([4, 4, 4, 4], {0: 10, 1: 30}, even=True) == [0, 1, 1, 1]


def test_gaps_are_filled_before_anything_is_left():
    # The run over device 0 ends at 6; the last 2 fit only into what it left.
    assert split([6, 7, 2], {0: 9, 1: 7}) == [0, 1, 0]
    assert split([6, 7, 4], {0: 9, 1: 7}) == [0, 1, None]


def test_a_part_that_fits_nowhere_whole_is_split_over_the_devices():
    # Two devices of 22 hold a transformer of 24 in blocks (flux on two cards).
    parts = {"text_encoder": [10], "transformer": [2] * 12, "vae": [1]}
    places = spread(parts, {0: 22, 1: 22})
    assert None not in itertools.chain(*places.values())
    assert set(places["transformer"]) == {0, 1}
    # In one run on each device.
    assert len(list(itertools.groupby(places["transformer"]))) == 2


def test_parts_that_fit_a_device_but_not_together_are_split_before_the_cpu_is_used():
    places = spread({"a": [7], "b": [7], "c": [3, 3]}, {0: 10, 1: 10})
    assert places["c"] in ([0, 1], [1, 0])


def test_a_device_is_filled_before_the_cpu_and_keeps_room_for_what_comes_in():
    for strategy in ("balanced", "auto", "sequential"):
        places = spread({"unet": [10] * 15}, {0: 100}, strategy)["unet"]
        # Nine blocks stay; the tenth's room is for the others, which come in one after another.
        assert places.count(0) == 9
        assert places.count(None) == 6


def test_a_layer_larger_than_every_device_is_an_error_that_names_its_part():
    with pytest.raises(ValueError, match=r"unet has a layer that needs 30 bytes.*\(20 at most\)"):
        spread({"unet": [30, 1], "vae": [2]}, {0: 20, 1: 10})
    places = spread({"unet": [30, 1], "vae": [2]}, {0: 20, 1: 10}, pieces={"unet": [15, 1], "vae": [2]})
    assert places == {"unet": [None, 0], "vae": [1]}


def test_auto_fills_the_first_device_with_the_largest_and_balanced_spreads():
    parts = {"text_encoder": [GIB], "unet": [5 * GIB], "vae": [GIB]}
    assert spread(parts, {0: 6 * GIB, 1: 6 * GIB}, "auto") == {"text_encoder": [0], "unet": [0], "vae": [1]}
    assert spread(parts, {0: 6 * GIB, 1: 6 * GIB}, "sequential") == {"text_encoder": [0], "unet": [0], "vae": [1]}
    assert spread(parts, {0: 6 * GIB, 1: 6 * GIB}, "balanced") == {"text_encoder": [1], "unet": [0], "vae": [1]}
    three = {"a": [3], "b": [5], "c": [2]}
    assert spread(three, {0: 7, 1: 7}, "auto") == {"b": [0], "a": [1], "c": [0]}
    assert spread(three, {0: 7, 1: 7}, "sequential") == {"a": [0], "b": [1], "c": [0]}
