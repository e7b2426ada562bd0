"""Which files are chosen, and what is downloaded from a repo: one commit, no weight that is not read."""

from pathlib import Path
from typing import Any

import pytest

from diffusion_core import Pipeline
from diffusion_core.errors import MissingFileError
from diffusion_core.hub import list_files
from diffusion_core.pipelines.files import choose, needed, weights_in

PLAIN = ["config.json", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"]
HALF = ["diffusion_pytorch_model.fp16.safetensors"]
SHARDS = [f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
HALF_SHARDS = [f"diffusion_pytorch_model.fp16-0000{n}-of-00002.safetensors" for n in (1, 2)]
OLD_HALF_SHARDS = [f"diffusion_pytorch_model-0000{n}-of-00002.fp16.safetensors" for n in (1, 2)]
INDEX = "diffusion_pytorch_model.safetensors.index.json"
HALF_INDEX = "diffusion_pytorch_model.safetensors.index.fp16.json"
OLD_HALF_INDEX = "diffusion_pytorch_model.safetensors.fp16.index.json"


@pytest.mark.parametrize(
    ("names", "variant", "use_safetensors", "expected"),
    [
        (PLAIN, None, None, (None, "safetensors", [PLAIN[1]])),
        (PLAIN, None, False, (None, "bin", [PLAIN[2]])),
        (PLAIN + HALF, "fp16", None, ("fp16", "safetensors", HALF)),
        (PLAIN + HALF, "bf16", None, (None, "safetensors", [PLAIN[1]])),
        ([PLAIN[2]], None, None, (None, "bin", [PLAIN[2]])),
        ([*SHARDS, INDEX, *HALF], None, True, (None, "safetensors", [*SHARDS, INDEX])),
        ([*SHARDS, INDEX, *HALF_SHARDS, HALF_INDEX], "fp16", None, ("fp16", "safetensors", [*HALF_SHARDS, HALF_INDEX])),
        ([*OLD_HALF_SHARDS, OLD_HALF_INDEX], "fp16", None, ("fp16", "safetensors", [*OLD_HALF_SHARDS, OLD_HALF_INDEX])),
        (["model.safetensors", "pytorch_model.bin"], None, False, (None, "bin", ["pytorch_model.bin"])),
        (["model.non_ema.safetensors"], "non_ema", None, ("non_ema", "safetensors", ["model.non_ema.safetensors"])),
    ],
)
def test_one_set_of_weights_is_chosen(names, variant, use_safetensors, expected) -> None:
    chosen = choose(names, variant, use_safetensors)
    assert chosen is not None
    assert (chosen.variant, chosen.kind, sorted(chosen.files)) == (*expected[:2], sorted(expected[2]))


@pytest.mark.parametrize(
    ("names", "use_safetensors"),
    [([], None), (["config.json"], None), ([PLAIN[2]], True), ([PLAIN[1]], False), (HALF, None)],
)
def test_no_weights(names, use_safetensors) -> None:
    assert choose(names, None, use_safetensors) is None


@pytest.mark.parametrize(
    "name", ["model_index.json", "modeling.py", "LICENSE", "model.onnx", "other.safetensors", "model.ckpt", "", "."]
)
def test_what_is_no_weight_file(name: str) -> None:
    assert weights_in([name]) == []


def test_needed_files() -> None:
    files = {
        "unet": [*PLAIN, *HALF, *SHARDS, INDEX, "diffusion_flax_model.msgpack", "evil.py", "model.onnx"],
        "tokenizer": ["vocab.json", "merges.txt", "spiece.model", "picture.png"],
        "prior": ["model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.bin"],
    }
    assert needed(files, "fp16", None) == [
        "prior/model_index.json",
        "prior/unet/config.json",
        "prior/unet/diffusion_pytorch_model.bin",
        "tokenizer/merges.txt",
        "tokenizer/spiece.model",
        "tokenizer/vocab.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.fp16.safetensors",
    ]


class FakeHub:
    """A repo in memory that writes what is asked for into a cache, as `huggingface_hub` does."""

    def __init__(self, cache: Path, files: list[str], index: str) -> None:
        self.files, self.index = files, index
        self.folder = cache / "models--owner--name" / "snapshots" / "abc123"
        self.revisions: list[Any] = []

    def find_file(self, repo: str, name: str, **hub: Any) -> Path:
        self.revisions.append(hub.get("revision"))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(self.index)
        return self.folder / name

    def list_files(self, repo: str, **hub: Any) -> list[str]:
        self.revisions.append(hub.get("revision"))
        return self.files

    def snapshot(self, repo: str, *, allow_patterns: list[str], **hub: Any) -> Path:
        self.revisions.append(hub.get("revision"))
        for name in allow_patterns:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).touch()
        return self.folder


INDEX_TEXT = '{"_class_name": "X", "unet": ["diffusers", "U"], "vae": ["diffusers", "V"], "extra": [null, null]}'


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    files = [f"{part}/{name}" for part in ("unet", "vae", "extra") for name in PLAIN]
    fake = FakeHub(tmp_path, [*files, f"unet/{HALF[0]}", "README.md", "model.ckpt", "model_index.json"], INDEX_TEXT)
    for name in ("find_file", "list_files", "snapshot"):
        monkeypatch.setattr(f"diffusion_core.pipelines.loading.{name}", getattr(fake, name))
    return fake


def test_download_takes_one_commit_and_what_is_needed(hub: FakeHub) -> None:
    folder = Pipeline.download("owner/name", variant="fp16", revision="main")
    assert sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()) == [
        "model_index.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ]
    assert hub.revisions == ["main", "abc123", "abc123"]


def test_download_refuses_a_variant_that_is_nowhere(hub: FakeHub) -> None:
    with pytest.raises(MissingFileError, match="variant 'bf16'; its variants are fp16"):
        Pipeline.download("owner/name", variant="bf16")


@pytest.mark.parametrize("several", ["MultiControlNetModel", "FluxMultiControlNetModel", "ControlNetModel"])
def test_download_takes_each_folder_of_several_controlnets(hub: FakeHub, several: str) -> None:
    """And none of a component that only has a number in its name."""
    hub.index = f'{{"controlnet": ["diffusers", "{several}"], "text_encoder": ["transformers", "CLIPTextModel"]}}'
    parts = ("controlnet", "controlnet_1", "controlnet_10", "controlnet_old", "text_encoder", "text_encoder_2")
    hub.files = [f"{part}/{name}" for part in parts for name in PLAIN]
    folder = Pipeline.download("owner/name")
    further = {"controlnet_1", "controlnet_10"} if several.startswith(("Multi", "FluxMulti")) else set()
    assert {each.name for each in folder.iterdir() if each.is_dir()} == {"controlnet", "text_encoder"} | further
    for part in further:
        assert sorted(each.name for each in (folder / part).iterdir()) == PLAIN[:2]


def test_pipelines_fetch_each_folder_of_several_controlnets(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given by name, or absent from the class, is not fetched."""
    asked: list[str] = []

    def stop(repo: str, *, allow_patterns: list[str], **_: Any) -> Path:
        asked.extend(allow_patterns)
        raise KeyboardInterrupt

    monkeypatch.setattr("diffusion_core.pipelines.loading.snapshot", stop)
    hub.index = (
        '{"_class_name": "StableDiffusionControlNetPipeline", "unet": ["diffusers", "UNet2DConditionModel"], '
        '"vae": ["diffusers", "AutoencoderKL"], "scheduler": ["diffusers", "DDIMScheduler"], '
        '"controlnet": ["diffusers", "MultiControlNetModel"], "text_encoder_2": ["transformers", "CLIPTextModel"]}'
    )
    parts = ("unet", "vae", "scheduler", "controlnet", "controlnet_1", "text_encoder_2")
    hub.files = [f"{part}/{name}" for part in parts for name in PLAIN]
    given = {"safety_checker": None, "feature_extractor": None, "text_encoder": None, "tokenizer": None, "vae": None}
    with pytest.raises(KeyboardInterrupt):
        Pipeline.from_pretrained("owner/name", **given)
    folders = {name.partition("/")[0] for name in asked if "/" in name}
    assert folders == {"unet", "scheduler", "controlnet", "controlnet_1"}


def test_download_of_a_folder_returns_it(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "X"}')
    assert Pipeline.download(tmp_path) == tmp_path


def test_files_of_a_folder_and_of_a_repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unet").mkdir()
    for name in ("model_index.json", "unet/config.json"):
        (tmp_path / name).touch()
    assert list_files(tmp_path) == ["model_index.json", "unet/config.json"]

    listed = lambda self, repo, *, revision, token: ["b", f"{repo}@{revision}"]  # noqa: E731
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", listed)
    assert list_files("owner/name", revision="v1") == ["b", "owner/name@v1"]

    def no_connection(self, repo, *, revision, token):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", no_connection)
    with pytest.raises(MissingFileError, match="nor in the local cache"):
        list_files("owner/name", cache_dir=tmp_path / "cache")
