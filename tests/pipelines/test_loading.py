"""Pipelines from files and back: what is loaded, how, what is refused, and the round trip with the reference."""

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch

import diffusion_core
from diffusion_core import Pipeline
from diffusion_core.errors import CheckpointError, ConfigError, DiffusionCoreError, MissingFileError, PlacementError
from diffusion_core.pipelines.components import ABSENT, class_of
from diffusion_core.pipelines.loading import pipeline_class
from tests.support import HUB, needs_shared

from . import tiny


class Coder(Pipeline):
    """Text encoder, tokenizer and autoencoder: enough to load from a Stable Diffusion folder."""

    _optional_components: ClassVar = ["extra", "safety_checker"]

    def __init__(self, vae, text_encoder, tokenizer, extra=None, safety_checker=None, flag: bool = True) -> None:
        super().__init__()
        self.register_modules(
            vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, extra=extra, safety_checker=safety_checker
        )


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Coder:
    tokenizer = tiny.tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Coder(tiny.vae(diffusion_core), tiny.text_encoder(), tokenizer)


@pytest.fixture(scope="module")
def saved(coder: Coder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is only read."""
    folder = tmp_path_factory.mktemp("saved")
    coder.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A folder that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit(folder: Path, **entries: Any) -> None:
    """Change entries of model_index.json."""
    file = folder / "model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    here, there = one.state_dict(), other.state_dict()
    return here.keys() == there.keys() and all(torch.equal(value, there[name]) for name, value in here.items())


# ---- what is written ----


def test_the_index_names_components_absent_ones_and_settings(saved: Path) -> None:
    assert json.loads((saved / "model_index.json").read_text()) == {
        "_class_name": "Coder",
        "_diffusers_version": "0.42.1",
        "extra": [None, None],
        "flag": True,
        "safety_checker": [None, None],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    assert sorted(each.name for each in saved.iterdir()) == ["model_index.json", "text_encoder", "tokenizer", "vae"]


def test_a_component_that_was_added_later_is_saved(coder: Coder, tmp_path: Path) -> None:
    pipe = Coder.from_pipe(coder)
    pipe.extra = tiny.vae(diffusion_core, seed=5)
    pipe.save_pretrained(tmp_path)
    assert same_weights(Coder.from_pretrained(tmp_path).extra, pipe.extra)


def test_a_component_that_was_dropped_is_not_saved(coder: Coder, tmp_path: Path) -> None:
    pipe = Coder.from_pipe(coder)
    pipe.vae = None
    pipe.save_pretrained(tmp_path)
    assert not (tmp_path / "vae").exists()
    with pytest.raises(ConfigError, match="Coder needs vae"):
        Coder.from_pretrained(tmp_path)


def test_saving_what_cannot_be_saved_writes_nothing(coder: Coder, tmp_path: Path) -> None:
    pipe = Coder.from_pipe(coder, extra=object())
    with pytest.raises(TypeError, match=r"extra \(object\) cannot be saved"):
        pipe.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_saving_over_a_file_and_stray_arguments_are_refused(coder: Coder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="name a folder"):
        coder.save_pretrained(tmp_path / "file")
    with pytest.raises(TypeError, match="repo_id, which only push_to_hub=True uses"):
        coder.save_pretrained(tmp_path / "new", repo_id="a/b")


def test_saving_over_the_folder_that_the_weights_are_mapped_from(folder: Path, coder: Coder) -> None:
    pipe = Coder.from_pretrained(folder)
    pipe.save_pretrained(folder)
    assert same_weights(Coder.from_pretrained(folder).vae, coder.vae)


def test_push_to_hub_uploads_a_complete_folder(coder: Coder, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {}

    def upload(folder, repo_id, **options):
        sent.update(names=sorted(each.name for each in Path(folder).iterdir()), repo_id=repo_id, **options)
        return "address"

    monkeypatch.setattr("diffusion_core.pipelines.base.upload", upload)
    assert coder.push_to_hub("me/coder", private=True) == "address"
    assert sent == {
        "names": ["model_index.json", "text_encoder", "tokenizer", "vae"],
        "repo_id": "me/coder",
        "private": True,
        "commit_message": "Upload Coder",
    }


# ---- what is read ----


def test_a_round_trip_keeps_weights_settings_and_absence(coder: Coder, tmp_path: Path) -> None:
    Coder.from_pipe(coder, flag=False).save_pretrained(tmp_path)
    pipe = Coder.from_pretrained(tmp_path)
    assert same_weights(pipe.vae, coder.vae)
    assert same_weights(pipe.text_encoder, coder.text_encoder)
    assert pipe.tokenizer("a red cat").input_ids == coder.tokenizer("a red cat").input_ids
    assert pipe.config.flag is False
    assert pipe.extra is None
    assert pipe.name_or_path == str(tmp_path)
    assert not pipe.vae.training
    assert not pipe.text_encoder.training


@pytest.mark.parametrize("size", [20_000, "20KB"])
def test_sharded(coder: Coder, tmp_path: Path, size) -> None:
    coder.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "vae" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    assert same_weights(Coder.from_pretrained(tmp_path).vae, coder.vae)


@pytest.fixture(scope="module")
def half(coder: Coder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights in float16."""
    folder = tmp_path_factory.mktemp("half")
    pipe = Coder.from_pretrained(_saved_copy(coder, folder), dtype="float16")
    pipe.save_pretrained(folder)
    return folder


def _saved_copy(coder: Coder, folder: Path) -> Path:
    coder.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("dtype", "vae", "text_encoder"),
    [
        (None, torch.float32, torch.float32),
        ("auto", torch.float16, torch.float16),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("torch.float32", torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ({"vae": torch.bfloat16}, torch.bfloat16, torch.float32),
        ({"vae": "auto", "default": "bfloat16"}, torch.float16, torch.bfloat16),
    ],
)
def test_dtype(half: Path, dtype, vae, text_encoder) -> None:
    for argument in ("dtype", "torch_dtype"):
        pipe = Coder.from_pretrained(half, **{argument: dtype})
        assert (pipe.vae.dtype, pipe.text_encoder.dtype) == (vae, text_encoder)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dtype": "auto", "torch_dtype": "auto"}, ValueError, "the same argument"),
        ({"dtype": "float13"}, ValueError, "float13"),
        ({"dtype": {"unett": "float16"}}, ValueError, "'unett', which is no component"),
        ({"dtype": {"vea": "float16"}}, ValueError, "did you mean vae"),
        ({"dtype": {"vae": 3}}, TypeError, "dtype"),
        ({"text_encodr": None}, TypeError, "no argument 'text_encodr'; did you mean text_encoder"),
        ({"vae": "stabilityai/sd-vae"}, TypeError, r"load it first, with AutoencoderKL\.from_pretrained"),
        ({"vae": Path("somewhere")}, TypeError, "load it first"),
        ({"vae": 3}, TypeError, "vae: int cannot take the place of AutoencoderKL"),
        ({"tokenizer": torch.nn.Identity()}, TypeError, "tokenizer: Identity cannot"),
        ({"quantization_config": object()}, TypeError, "PipelineQuantizationConfig"),
        ({"custom_pipeline": "someone/code"}, ValueError, "code from a repo is never run"),
        ({"device_map": "nonsense"}, PlacementError, "nonsense"),
        ({"device_map": {"vae": "cpu"}}, PlacementError, "says nothing about text_encoder"),
        ({"max_memory": {0: "1GB"}}, PlacementError, "max_memory"),
        ({"variant": "fp16"}, MissingFileError, "no weights of the variant 'fp16'; it has none"),
    ],
)
def test_what_is_refused(saved: Path, arguments, error, message, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_core.pipelines.loading.load_component", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(error, match=message):
        Coder.from_pretrained(saved, **arguments)


def test_arguments_of_the_reference_that_change_nothing_are_taken(saved: Path) -> None:
    Coder.from_pretrained(
        saved,
        low_cpu_mem_usage=False,
        disable_mmap=True,
        use_safetensors=True,
        trust_remote_code=True,
        proxies=None,
        custom_pipeline=None,
        local_files_only=True,
    )


@pytest.mark.parametrize("device_map", ["cpu", torch.device("cpu"), {"": "cpu"}])
def test_a_single_device(saved: Path, device_map) -> None:
    pipe = Coder.from_pretrained(saved, device_map=device_map)
    assert pipe.device == torch.device("cpu")
    assert pipe.to(torch.float16).dtype == torch.float16


def test_components_given_by_name_replace_or_drop(saved: Path, coder: Coder) -> None:
    other = tiny.vae(diffusion_core, seed=7)
    pipe = Coder.from_pretrained(saved, vae=other, text_encoder=None, flag=False)
    assert pipe.vae is other
    assert pipe.text_encoder is None
    assert pipe.config.text_encoder == (None, None)
    assert pipe.config.flag is False
    assert "extra" in Coder.from_pretrained(saved, extra=coder.vae).components


def test_a_dropped_component_is_not_even_looked_at(folder: Path) -> None:
    shutil.rmtree(folder / "text_encoder")
    assert Coder.from_pretrained(folder, text_encoder=None).text_encoder is None
    with pytest.raises(MissingFileError, match="no files for text_encoder"):
        Coder.from_pretrained(folder)


def test_progress_is_told_over_components(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Coder.from_pretrained(saved)
    assert "Loading components" in capsys.readouterr().err


# ---- model_index.json ----


def test_missing_components_are_all_listed(folder: Path) -> None:
    edit(folder, vae=[None, None], text_encoder=None)
    with pytest.raises(ConfigError, match="needs vae, text_encoder, which"):
        Coder.from_pretrained(folder)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"vae": "AutoencoderKL"}, "expected a pair"),
        ({"vae": ["diffusers"]}, "expected a pair"),
        ({"vae": ["diffusers", 3]}, "expected a pair"),
        ({"vae": ["diffusers", None]}, "not a pair"),
        ({"vae": ["diffusers", "NoSuchModel"]}, "no class NoSuchModel of diffusers"),
        ({"vae": ["transformers", "NoSuchModel"]}, "no class NoSuchModel of transformers"),
        ({"vae": ["diffusers", "__version__"]}, "no class __version__"),
        ({"vae": ["os", "system"]}, "no class system of os"),
        ({"vae": ["os.path", "join"]}, "no class join"),
        ({"vae": ["antigravity", "fly"]}, "no class fly of antigravity"),
        ({"vae": ["base", "Pipeline.run"]}, "no class"),
        ({"vae": ["../evil", "Evil"]}, "no class Evil"),
    ],
)
def test_entries_that_make_no_sense(folder: Path, entries, message) -> None:
    edit(folder, **entries)
    with pytest.raises(ConfigError, match=message):
        Coder.from_pretrained(folder)


def test_an_unknown_library_is_never_imported(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    edit(folder, vae=["planted", "Model"])
    with pytest.raises(ConfigError, match="no class Model of planted"):
        Coder.from_pretrained(folder)


@pytest.mark.parametrize("name", ["NoSuchPipeline", ["my_code", "MyPipeline"], None, "AutoencoderKL"])
def test_a_class_that_is_not_here(folder: Path, name) -> None:
    edit(folder, _class_name=name)
    with pytest.raises(ConfigError, match=r"model_index\.json names"):
        Pipeline.from_pretrained(folder)
    assert type(Coder.from_pretrained(folder)) is Coder  # the class that is called decides


def test_components_and_settings_of_other_pipelines(folder: Path) -> None:
    edit(folder, unet=["diffusers", "UNet2DConditionModel"], strength=0.5)
    pipe = Coder.from_pretrained(folder)
    assert "unet" not in pipe.components
    assert pipe.config.strength == 0.5
    assert json.loads(pipe.to_json_string())["_strength"] == 0.5  # the reference warns of keys without underscore
    pipe.save_pretrained(folder)
    assert Coder.from_pretrained(folder).config.strength == 0.5


def test_the_older_name_of_an_image_processor(coder: Coder, tmp_path: Path) -> None:
    from transformers import CLIPImageProcessor

    Coder.from_pipe(coder, extra=CLIPImageProcessor()).save_pretrained(tmp_path)
    edit(tmp_path, extra=["transformers", "CLIPFeatureExtractor"])
    assert type(Coder.from_pretrained(tmp_path).extra) is type(CLIPImageProcessor())


@pytest.mark.parametrize("content", ["", "[]", "{", "3", "\x00"])
def test_a_broken_index(folder: Path, content: str) -> None:
    (folder / "model_index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model_index\.json"):
        Coder.from_pretrained(folder)


def test_no_index(folder: Path) -> None:
    (folder / "model_index.json").unlink()
    with pytest.raises(MissingFileError, match=r"no file named model_index\.json.*text_encoder"):
        Coder.from_pretrained(folder)
    with pytest.raises(MissingFileError, match="no folder"):
        Coder.from_pretrained("/no/such/folder")
    with pytest.raises(MissingFileError, match="load it with AutoModel"):
        Pipeline.from_pretrained(folder / "vae")


def test_a_damaged_component_is_named(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="the component tokenizer, a CLIPTokenizer"):
        Coder.from_pretrained(folder)


# ---- variants ----


def test_a_variant_where_there_is_one_and_plain_files_where_not(coder: Coder, tmp_path: Path) -> None:
    coder.save_pretrained(tmp_path, variant="fp16")
    assert (tmp_path / "vae" / "diffusion_pytorch_model.fp16.safetensors").is_file()
    (tmp_path / "text_encoder" / "model.fp16.safetensors").rename(tmp_path / "text_encoder" / "model.safetensors")
    pipe = Coder.from_pretrained(tmp_path, variant="fp16")
    assert same_weights(pipe.vae, coder.vae)
    assert same_weights(pipe.text_encoder, coder.text_encoder)
    with pytest.raises(MissingFileError, match="its variants are fp16"):
        Coder.from_pretrained(tmp_path, variant="fp8")
    with pytest.raises(CheckpointError, match="fp16"):
        Coder.from_pretrained(tmp_path)


def test_files_without_a_dot_do_no_harm(coder: Coder, tmp_path: Path) -> None:
    coder.save_pretrained(tmp_path, variant="fp16")
    for name in ("vae", "tokenizer", "text_encoder"):
        (tmp_path / name / "LICENSE").write_text("all rights")
    Coder.from_pretrained(tmp_path, variant="fp16")


def test_sharded_variant(coder: Coder, tmp_path: Path) -> None:
    coder.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
    assert (tmp_path / "vae" / "diffusion_pytorch_model.safetensors.index.fp16.json").is_file()
    assert same_weights(Coder.from_pretrained(tmp_path, variant="fp16").vae, coder.vae)


def test_a_pipeline_within_a_pipeline(coder: Coder, tmp_path: Path) -> None:
    inner = Coder.from_pipe(coder, flag=False)
    Coder.from_pipe(coder, extra=inner).save_pretrained(tmp_path, variant="fp16")
    pipe = Coder.from_pretrained(tmp_path, variant="fp16", dtype="bfloat16")
    assert type(pipe.extra) is Coder
    assert pipe.extra.config.flag is False
    assert pipe.extra.dtype == torch.bfloat16


def test_load_config_gives_the_index(saved: Path) -> None:
    assert Pipeline.load_config(saved)["vae"] == ["diffusers", "AutoencoderKL"]


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_damage_to_the_index_is_an_error_or_harmless(folder: Path, count: int, monkeypatch) -> None:
    """Bytes and values of model_index.json are changed at random; nothing but the library's own errors comes out."""
    monkeypatch.setattr("diffusion_core.pipelines.loading.load_component", lambda cls, *_: cls.__new__(cls))
    file, random = folder / "model_index.json", Random(7)
    text = file.read_text()
    values = [None, [], {}, "", 1, True, "x" * 9, [None, None], ["os", "system"], ["transformers", "CLIPModel"], [[]]]
    loaded = 0
    for _ in range(count):
        if random.random() < 0.5:
            content = json.loads(text)
            content[random.choice([*content, "new"])] = random.choice(values)
            file.write_text(json.dumps(content))
        else:
            data = bytearray(text.encode())
            for _ in range(random.randint(1, 4)):
                data[random.randrange(len(data))] = random.randrange(256)
            file.write_bytes(data[: random.randint(1, len(data))] if random.random() < 0.2 else data)
        try:
            Coder.from_pretrained(folder)
            loaded += 1
        except DiffusionCoreError:
            pass
    print(f"{count} damaged files, {loaded} harmless")
    assert 0 < loaded < count


SHARED_INDEXES = sorted(HUB.glob("*/*/model_index.json"))


@needs_shared
@pytest.mark.parametrize("file", SHARED_INDEXES, ids=lambda file: file.parent.name)
def test_real_indexes_resolve_to_classes(file: Path) -> None:
    """Each pipeline class that is here accepts its real checkpoints: all required components, all classes known."""
    index = json.loads(file.read_text())
    if index["_class_name"] not in diffusion_core.__all__:
        pytest.skip(f"{index['_class_name']} is not here yet")
    cls = pipeline_class(index, Pipeline)
    for name, required in cls.component_arguments().items():
        entry = tuple(index.get(name, ABSENT))
        assert entry != ABSENT or not required
        if entry != ABSENT:
            found = class_of(entry)
            # Fast tokenizers go by the plain name in transformers 5.
            plain = found.__name__.removesuffix("Pil")
            assert entry[1] in (found.__name__, f"{plain}Fast", plain, "CLIPFeatureExtractor")
    assert not {key for key in index if not key.startswith("_")} - {*cls.component_arguments(), *cls.config_arguments()}
