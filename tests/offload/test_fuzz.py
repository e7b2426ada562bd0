"""Random and mutated checkpoint files: each gives a clear error or a right load, and never a half-made model.

Run the long form with `python -m pytest -m slow tests/offload/test_fuzz.py -s`; it prints how many files it tried.
"""

import json
import logging
import random
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diffusion_core.errors import DiffusionCoreError
from diffusion_core.models.auto import AutoModel
from diffusion_core.models.base import Model

NAME = "diffusion_pytorch_model"
SINGLE = f"{NAME}.safetensors"
INDEX = f"{SINGLE}.index.json"
# What the library raises on purpose; anything else that comes out is a bug.
OURS = (DiffusionCoreError, ValueError)
ODD_VALUES = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 1.5, 1e308, float("nan"), float("inf"),
    "", "x", "..", "../x", "/etc/passwd", "\0", "\ud800", "a" * 300, "F32", "BOOL", "config.json", SINGLE,
    [], [[]], [1], [0, 0], [None], {}, {"a": {}},
]  # fmt: skip


class Small(Model):
    """Two layers and a buffer that no checkpoint holds."""

    def __init__(self, width: int = 3, label: str = "", widths: tuple[int, ...] = (1, 2)) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, 2, bias=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class Fuzzer:
    """Makes a good checkpoint, spoils a file of it, loads it, and judges what happened."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.outcomes: Counter[str] = Counter()
        self.model = Small()
        self.expected = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        self.pristine: dict[bool, dict[str, bytes]] = {}
        for sharded in (False, True):
            place = folder / f"pristine-{sharded}"
            self.model.save_pretrained(place, max_shard_size=32 if sharded else "5GB")
            self.pristine[sharded] = {path.name: path.read_bytes() for path in place.iterdir()}
            self.pristine[sharded]["model_index.json"] = json.dumps(
                {"_class_name": "P", "unet": ["diffusion_core", "Small"], "other": [None, None], "number": 3}
            ).encode()

    def run(self, rounds: int) -> None:
        targets: list[tuple[bool, Callable[[dict[str, bytes]], None]]] = [
            (False, self.spoil_header), (True, self.spoil_header), (False, self.spoil_bytes), (True, self.spoil_bytes),
            (True, self.spoil_index), (False, self.spoil_config), (True, self.spoil_files),
        ]  # fmt: skip
        current: dict[str, bytes] = {}
        place = self.folder / "spoiled"
        place.mkdir()
        for number in range(rounds):
            if number % 8 == 7:
                self.try_model_index(number)
                continue
            sharded, spoil = targets[number % len(targets)]
            content = dict(self.pristine[sharded])
            spoil(content)
            for name in current.keys() - content.keys():
                (place / name).unlink()
            for name, data in content.items():
                if current.get(name) != data:
                    (place / name).unlink(missing_ok=True)
                    (place / name).write_bytes(data)
            current = content
            self.try_load(place, number)

    def try_load(self, place: Path, number: int) -> None:
        strict = self.random.random() < 0.7
        dtype = self.random.choice([None, "auto", torch.bfloat16])
        kind = "error"
        try:
            model = Small.from_pretrained(place, strict=strict, dtype=dtype, disable_mmap=self.random.random() < 0.5)
        except OURS as error:
            assert str(error), f"round {number}: an error without a message"
            assert not isinstance(error, UnicodeError | json.JSONDecodeError), f"round {number}: {error!r}"
        else:
            kind = "load"
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                assert not tensor.is_meta, f"round {number}: {name} is on meta"
                assert tensor.device.type == "cpu" and tensor.float().sum() is not None
            assert torch.equal(model.table, torch.arange(4.0)), f"round {number}"
            if strict:
                assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
                    name: tensor.shape for name, tensor in Small(model.config.width).state_dict().items()
                }
        self.outcomes[kind] += 1

    def try_model_index(self, number: int) -> None:
        """Spoil the file that names the classes of a pipeline, and ask for one of them."""
        place = self.folder / "pipeline"
        if not place.exists():
            self.model.save_pretrained(place / "unet")
        index = self.spoiled_json(json.loads(self.pristine[False]["model_index.json"]))
        (place / "model_index.json").write_bytes(index)
        try:
            loaded = AutoModel.from_pretrained(place, subfolder="unet")
        except OURS as error:
            assert str(error), f"round {number}: an error without a message"
            self.outcomes["error"] += 1
        else:
            assert all(torch.equal(tensor, self.expected[name]) for name, tensor in loaded.state_dict().items())
            self.outcomes["load"] += 1

    def spoil_header(self, content: dict[str, bytes]) -> None:
        """Change the JSON head of a weight file, leaving its data or cutting it."""
        name = self.random.choice([name for name in content if name.endswith(".safetensors")])
        data = content[name]
        length = struct.unpack("<Q", data[:8])[0]
        head = self.spoiled_json(json.loads(data[8 : 8 + length]))
        claimed = (
            len(head)
            if self.random.random() < 0.9
            else self.random.choice([0, 1, 2**40, 2**64 - 1, max(0, len(head) - 1)])
        )
        content[name] = struct.pack("<Q", claimed) + head + data[8 + length :]

    def spoil_bytes(self, content: dict[str, bytes]) -> None:
        """Change, cut, double or replace raw bytes of any file."""
        name = self.random.choice(sorted(content))
        data = bytearray(content[name])
        for _ in range(self.random.randint(1, 4)):
            place = self.random.randrange(len(data) + 1)
            action = self.random.randrange(5)
            if action == 0 and data:
                data[place % len(data)] ^= 1 << self.random.randrange(8)
            elif action == 1:
                del data[place:]
            elif action == 2:
                data[place:place] = self.random.randbytes(self.random.randint(1, 20))
            elif action == 3:
                del data[place : place + self.random.randint(1, 9)]
            else:
                data[place : place + 8] = self.random.choice([b"\0" * 8, b"\xff" * 8, b"<html>  ", b'"a":[[[{'])
        content[name] = bytes(data)

    def spoil_index(self, content: dict[str, bytes]) -> None:
        content[INDEX] = self.spoiled_json(json.loads(content[INDEX]))

    def spoil_config(self, content: dict[str, bytes]) -> None:
        content["config.json"] = self.spoiled_json(json.loads(content["config.json"]))

    def spoil_files(self, content: dict[str, bytes]) -> None:
        """Swap, drop or copy whole files."""
        first, second = self.random.sample(sorted(content), 2)
        action = self.random.randrange(4)
        if action == 0:
            content[first], content[second] = content[second], content[first]
        elif action == 1:
            del content[first]
        elif action == 2:
            content[first] = content[second]
        else:
            content[first] = self.random.choice(
                [b"", b"{}", b"version https://git-lfs.github.com/spec/v1\n", b"<html></html>"]
            )

    def spoiled_json(self, value: Any) -> bytes:
        """A JSON value with a few of its parts replaced, removed, renamed or doubled; seldom no JSON at all."""
        if self.random.random() < 0.05:
            return self.random.choice(
                [b"", b"[", b"null", b"3", b'"x"', b"[" * 3000, b'{"a":1,"a":2}', b"\xff\xfe", b"1" * 5000]
            )
        for _ in range(self.random.randint(1, 3)):
            value = self.changed(value)
        text = json.dumps(value)
        if self.random.random() < 0.1:
            text = text.replace(":", self.random.choice(["::", ":1,", " : ", ""]), 1)
        return text.encode("utf-8", "surrogatepass")

    def changed(self, value: Any) -> Any:
        if isinstance(value, dict) and value and self.random.random() < 0.85:
            key = self.random.choice(list(value))
            result = dict(value)
            action = self.random.randrange(6)
            if action == 0:
                del result[key]
            elif action == 1:
                result[str(self.random.choice(ODD_VALUES))] = result.pop(key)
            elif action == 2:
                result[key] = result[self.random.choice(list(value))]
            else:
                result[key] = self.changed(result[key])
            return result
        if isinstance(value, list) and value and self.random.random() < 0.7:
            place = self.random.randrange(len(value))
            return [*value[:place], self.changed(value[place]), *value[place + self.random.randrange(2) :]]
        if isinstance(value, int) and self.random.random() < 0.5:
            return value + self.random.choice([-8, -4, -1, 1, 4, 8, 2**33])
        return self.random.choice(ODD_VALUES)


def fuzz(rounds: int, seed: int, monkeypatch) -> Counter[str]:
    monkeypatch.setattr("diffusion_core.models.Small", Small, raising=False)
    monkeypatch.setattr("diffusion_core.progress._enabled", False)
    logging.getLogger("diffusion_core").setLevel(logging.CRITICAL)
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        fuzzer = Fuzzer(folder, seed)
        fuzzer.run(rounds)
    finally:
        shutil.rmtree(folder)
        logging.getLogger("diffusion_core").setLevel(logging.NOTSET)
    assert fuzzer.outcomes.total() == rounds
    return fuzzer.outcomes


@pytest.mark.timeout(120)
def test_spoiled_files_never_give_a_half_made_model(monkeypatch):
    outcomes = fuzz(2_000, 0, monkeypatch)
    assert outcomes["error"] > 800 and outcomes["load"] > 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_spoiled_files(monkeypatch):
    outcomes = fuzz(100_000, 1, monkeypatch)
    print(f"{outcomes.total()} spoiled checkpoints: {outcomes['error']} clear errors, {outcomes['load']} whole loads")
    assert outcomes["error"] > 40_000 and outcomes["load"] > 5_000
