"""The config round trip: constructor, file, constructor; and files of the reference."""

import copy
import json
import pickle
import threading

import diffusers
import pytest

from diffusion_core.config import ConfigMixin, FrozenDict, unknown_entries, write_text
from diffusion_core.errors import ConfigError, MissingFileError


class Lamp(ConfigMixin):
    config_name = "lamp.json"
    ignore_for_config = ("secret",)

    def __init__(self, colours=("red", "green"), watts: float = 60.0, shade: dict | None = None, secret: int = 0):
        self.seen = dict(self.config)


class Lantern(ConfigMixin):
    config_name = "lamp.json"

    def __init__(self, watts: float = 5.0, fuel: str = "oil"):
        pass


class SmallLamp(Lamp):
    def __init__(self, colours=("blue",), size: int = 1):
        super().__init__(colours=colours, watts=15.0)


class Demanding(ConfigMixin):
    def __init__(self, needed):
        pass


def test_the_arguments_are_the_config_before_the_body_runs():
    lamp = Lamp(["white"], shade={"a": [1]})
    assert lamp.seen["colours"] == ["white"] and lamp.config.watts == 60.0 and lamp.watts == 60.0
    assert "secret" not in lamp.config and not hasattr(lamp, "secret")
    assert lamp.config._use_default_values == ["watts"]
    assert SmallLamp(size=3).config == {"colours": ["blue"], "size": 3}


def test_a_round_trip_compares_equal(tmp_path):
    lamp = Lamp(shade={"deep": (1, 2)})
    lamp.save_config(tmp_path)
    again = Lamp.from_config(Lamp.load_config(tmp_path))
    assert again.config == lamp.config and not again.config.__ne__(lamp.config)
    assert again.config.colours == ["red", "green"] and lamp.config.colours == ("red", "green")
    assert again.config == {"colours": ("red", "green"), "watts": 60, "shade": {"deep": [1, 2]}}
    assert again.config != Lamp(watts=1).config and lamp.config != 3
    again.save_config(tmp_path / "second")
    assert (tmp_path / "second" / "lamp.json").read_text() == (tmp_path / "lamp.json").read_text()
    lamp.to_json_file(tmp_path / "any.name")
    assert Lamp.load_config(tmp_path / "any.name") == json.loads((tmp_path / "lamp.json").read_text())


def test_a_config_cannot_be_changed_and_copies_stay_whole():
    lamp = Lamp()
    for change in (
        lambda c: c.pop("watts"),
        lambda c: c.popitem(),
        lambda c: c.clear(),
        lambda c: c.update(watts=1),
        lambda c: c.setdefault("x", 1),
        lambda c: c.__setitem__("watts", 1),
        lambda c: c.__delitem__("watts"),
        lambda c: setattr(c, "watts", 1),
    ):
        with pytest.raises(TypeError, match="from_config"):
            change(lamp.config)
    for other in (copy.deepcopy(lamp.config), copy.copy(lamp.config), pickle.loads(pickle.dumps(lamp.config))):
        assert type(other) is FrozenDict and other == lamp.config
    with pytest.raises(AttributeError, match="has no 'wats'"):
        _ = lamp.config.wats
    with pytest.raises(AttributeError, match="'Lamp' object has no attribute 'wats'"):
        _ = lamp.wats


def test_lists_of_the_caller_are_copied():
    colours, shade = ["red"], {"a": [1]}
    lamp = Lamp(colours, shade=shade)
    colours.append("blue")
    shade["a"].append(2)
    assert lamp.config.colours == ["red"] and lamp.config.shade == {"a": [1]}


def test_keys_of_other_classes_are_carried_and_defaults_give_way():
    lantern = Lantern.from_config(Lamp(shade={"x": 1}).config)
    assert lantern.config.watts == 5.0 and lantern.config.shade == {"x": 1}
    assert Lamp.from_config(lantern.config).config.shade == {"x": 1}
    assert Lantern.from_config(Lamp(watts=7).config).config.watts == 7
    assert Lantern.from_config(Lamp(watts=7).config, watts=8).config.watts == 8


def test_unknown_words_are_told(caplog):
    _, unused = Lamp.from_config({}, return_unused_kwargs=True, volts=3)
    assert unused == {"volts": 3} and not caplog.text
    Lamp.from_config({}, volts=3)
    assert "Lamp takes no ['volts']" in caplog.text
    assert unknown_entries(Lamp, {"volts": 1, "watts": 2, "_class_name": "x"}) == ["volts"]


def test_bad_configs_are_explained(tmp_path):
    with pytest.raises(ConfigError, match="load_config"):
        Lamp.from_config("some/path")
    with pytest.raises(ConfigError, match=r"lacks \['needed'\]"):
        Demanding.from_config({})
    with pytest.raises(MissingFileError, match=r"no file named lamp\.json"):
        Lamp.load_config(tmp_path)
    for text, message in [
        ("{", "not readable as JSON"),
        ("[]", "a JSON list"),
        ("[" * 9999, "not readable"),
        ("\udcff", "not readable"),
    ]:
        (tmp_path / "lamp.json").write_text(text, errors="surrogateescape")
        with pytest.raises(ConfigError, match=message) as caught:
            Lamp.load_config(tmp_path)
        assert "lamp.json" in str(caught.value)
    (tmp_path / "lamp.json").unlink()
    (tmp_path / "lamp.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file of weights: name the folder"):
        Lamp.load_config(tmp_path / "lamp.safetensors")
    with pytest.raises(TypeError, match="pretrained_model_name_or_path must be a folder or a repo id, not NoneType"):
        Lamp.load_config(None)
    with pytest.raises(TypeError, match="Lamp: got an unexpected keyword argument 'volts'"):
        Lamp(volts=1)
    for name in ("b", "a"):
        Lamp().save_config(tmp_path / name)
    with pytest.raises(MissingFileError, match="have one: a, b; pass subfolder='a'"):
        Lamp.load_config(tmp_path)
    assert Lamp.load_config(tmp_path, subfolder="b", return_unused_kwargs=True, extra=1)[1] == {"extra": 1}
    with pytest.raises(NotADirectoryError, match="save_directory"):
        Lamp().save_config(tmp_path / "a" / "lamp.json")


def test_files_are_replaced_whole_even_by_many_threads(tmp_path):
    path = tmp_path / "file.txt"
    texts = [letter * 100_000 for letter in "abcd"]
    threads = [threading.Thread(target=lambda text=text: [write_text(path, text) for _ in range(20)]) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not path.exists() or path.read_text() in texts
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


class DDIMLike(ConfigMixin):
    config_name = "scheduler_config.json"

    def __init__(self, num_train_timesteps: int = 1000, trained_betas=None, clip_sample: bool = True):
        pass


def test_the_file_is_the_reference_s(tmp_path):
    theirs = diffusers.DDIMScheduler(num_train_timesteps=10, clip_sample=False)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = DDIMLike.load_config(tmp_path / "theirs")
    ours = DDIMLike.from_config(loaded)
    assert ours.config.num_train_timesteps == 10 and ours.config.clip_sample is False
    DDIMLike.__name__ = "DDIMScheduler"
    ours.save_config(tmp_path / "ours")
    first, second = ((tmp_path / who / "scheduler_config.json").read_text() for who in ("theirs", "ours"))
    assert first == second
    assert diffusers.DDIMScheduler.from_pretrained(tmp_path / "ours").config.num_train_timesteps == 10
