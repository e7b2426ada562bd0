"""Models of transformers through our files, and `AutoModel`: the same results as the class's own loader."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from diffusion_core.errors import ConfigError, CorruptFileError, KeyMismatchError, MissingFileError, NumericalError
from diffusion_core.models import AutoencoderTiny, AutoModel, UNet2DModel
from diffusion_core.models.base import Model
from diffusion_core.models.foreign import load_transformers_model
from diffusion_core.offload.loading import named_tensors
from tests.support import HUB, needs_shared

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CLIP = transformers.CLIPTextConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=100, projection_dim=8,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
VISION = transformers.CLIPVisionConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
)
T5 = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=100)
MODELS = {
    "clip": (transformers.CLIPTextModel, CLIP),
    "clip projection": (transformers.CLIPTextModelWithProjection, CLIP),
    "clip vision": (transformers.CLIPVisionModelWithProjection, VISION),
    "t5": (transformers.T5EncoderModel, T5),
}
WORDS = torch.tensor([[1, 5, 7, 2]])
DTYPES = [None, "auto", "float16", torch.bfloat16]


def same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    left, right = named_tensors(ours), named_tensors(theirs)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype is right[name].dtype, name
        assert torch.equal(tensor, right[name]), name
    assert not ours.training


def output(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        vision = "pixel_values" in str(model.main_input_name)
        return model(torch.ones(1, 3, 8, 8, dtype=model.dtype) if vision else WORDS)[0]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_that_of_transformers(tmp_path, kind, dtype):
    cls, config = MODELS[kind]
    cls(config).save_pretrained(tmp_path, max_shard_size=5000 if dtype is None else "5GB")
    ours = load_transformers_model(cls, tmp_path, dtype=dtype)
    theirs = cls.from_pretrained(tmp_path, dtype=dtype or torch.float32).eval()
    same(ours, theirs)
    assert torch.equal(output(ours), output(theirs))
    assert ours.name_or_path == str(tmp_path)


@pytest.mark.parametrize("cls", [transformers.CLIPTextModel, transformers.CLIPTextModelWithProjection])
def test_key_names_of_real_clip_checkpoints_are_understood(tmp_path, cls):
    """Files on the Hub have the prefix `text_model.` and hold position_ids, whatever the installed version writes."""
    cls(CLIP).save_pretrained(tmp_path)
    content = load_file(tmp_path / "model.safetensors")
    prefixed = {name if name.startswith("text_") else f"text_model.{name}": tensor for name, tensor in content.items()}
    prefixed["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(prefixed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    same(load_transformers_model(cls, tmp_path), cls.from_pretrained(tmp_path).eval())


@pytest.mark.parametrize("kind", ["clip", "t5"])
def test_variants_subfolders_and_bin_files(tmp_path, kind):
    cls, config = MODELS[kind]
    model = cls(config).half()
    model.save_pretrained(tmp_path / "encoder", variant="fp16")
    ours = load_transformers_model(cls, tmp_path, subfolder="encoder", variant="fp16", dtype="auto")
    assert torch.equal(output(ours.float()), output(model.float().eval()))
    with pytest.raises(MissingFileError, match=r"model\.safetensors.*pytorch_model\.bin"):
        load_transformers_model(cls, tmp_path, subfolder="encoder")
    torch.save(model.state_dict(), tmp_path / "encoder" / "pytorch_model.bin")
    assert torch.equal(output(load_transformers_model(cls, tmp_path, subfolder="encoder")), output(model))


def test_the_same_dtype_keeps_the_mapped_file(tmp_path):
    transformers.CLIPTextModel(CLIP).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    before = path.read_bytes()
    for disable_mmap in (False, True):
        model = load_transformers_model(transformers.CLIPTextModel, tmp_path, disable_mmap=disable_mmap)
        maps = Path("/proc/self/maps")
        address = model.get_input_embeddings().weight.data_ptr()
        if maps.exists():
            ranges = [line.split() for line in maps.read_text().splitlines() if line.endswith(str(path))]
            inside = any(int(r[0].split("-")[0], 16) <= address < int(r[0].split("-")[1], 16) for r in ranges)
            assert inside != disable_mmap
        torch.nn.init.zeros_(model.get_input_embeddings().weight)
    assert path.read_bytes() == before


def test_bad_files_get_our_errors(tmp_path):
    cls = transformers.CLIPTextModel
    cls(CLIP).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    content = load_file(path)
    first = sorted(content)[0]
    save_file({name: tensor for name, tensor in content.items() if name != first}, path)
    with pytest.raises(KeyMismatchError, match=f"1 missing: .*{first.removeprefix('text_model.')}"):
        load_transformers_model(cls, tmp_path)
    save_file({**content, first: torch.ones(3)}, path)
    with pytest.raises(KeyMismatchError, match="1 of another shape"):
        load_transformers_model(cls, tmp_path)
    save_file({**content, first: content[first] * float("nan")}, path)
    with pytest.raises(NumericalError, match=first):
        load_transformers_model(cls, tmp_path, check_finite=True)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CorruptFileError, match="cut off"):
        load_transformers_model(cls, tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_transformers_model(cls, tmp_path)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    sizes = {
        "encoder_block_out_channels": (8,),
        "decoder_block_out_channels": (8,),
        "num_encoder_blocks": (1,),
        "num_decoder_blocks": (1,),
    }
    AutoencoderTiny(**sizes).save_pretrained(folder / "vae")
    transformers.CLIPTextModel(CLIP).save_pretrained(folder / "text_encoder")
    transformers.CLIPTextModelWithProjection(CLIP).save_pretrained(folder / "text_encoder_2")
    index = {
        "_class_name": "SomePipeline", "vae": ["diffusers", "AutoencoderTiny"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "scheduler": ["diffusers", "DDIMScheduler"], "tokenizer": ["transformers", "CLIPTokenizer"],
        "odd": ["diffusers", "NoSuchModel"], "own": ["my_module", "MyModel"], "safety_checker": [None, None],
    }  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_auto_model_finds_the_class(pipeline):
    assert type(AutoModel.from_pretrained(pipeline, subfolder="vae", dtype="float16")) is AutoencoderTiny
    assert type(AutoModel.from_pretrained(pipeline / "vae")) is AutoencoderTiny
    assert type(AutoModel.from_pretrained(pipeline, subfolder="text_encoder")) is transformers.CLIPTextModel
    named = AutoModel.from_pretrained(pipeline / "text_encoder_2", dtype=torch.bfloat16)
    assert type(named) is transformers.CLIPTextModelWithProjection and named.dtype is torch.bfloat16
    assert type(AutoModel.from_pretrained(pipeline, subfolder="text_encoder_2")) is type(named)
    assert type(AutoModel.from_config(pipeline, subfolder="vae")) is AutoencoderTiny
    assert type(AutoModel.from_config({"_class_name": "UNet2DModel", "norm_num_groups": 8})) is UNet2DModel
    assert type(AutoModel.from_config(CLIP.to_dict() | {"architectures": None})).__name__ == "CLIPTextModel"


@pytest.mark.parametrize(
    ("subfolder", "message"),
    [
        ("scheduler", "DDIMScheduler"),
        ("tokenizer", "CLIPTokenizer"),
        ("odd", "NoSuchModel"),
        ("own", r"MyModel|my_module"),
    ],
)
def test_auto_model_names_what_it_cannot_load(pipeline, subfolder, message):
    with pytest.raises(ConfigError, match=message):
        AutoModel.from_pretrained(pipeline, subfolder=subfolder)


def test_auto_model_needs_a_class_and_runs_no_code(pipeline, tmp_path):
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModel.from_pretrained(pipeline, subfolder="vae", trust_remote_code=True)
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "file.Class"}}')
    with pytest.raises(ConfigError, match=r"neither _class_name nor model_type.*never run"):
        AutoModel.from_pretrained(tmp_path)
    with pytest.raises(MissingFileError, match=r"config\.json"):
        AutoModel.from_pretrained(pipeline)
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoModel()


@needs_shared
def test_every_model_folder_of_the_hub_names_a_class_or_says_which_is_absent():
    found, absent = set(), set()
    for path in sorted(HUB.glob("*/*/model_index.json")):
        for name, entry in json.loads(path.read_text()).items():
            folder = path.parent / name
            if not isinstance(entry, list) or not (folder / "config.json").is_file():
                continue
            try:
                loader = AutoModel._find(path.parent, name, {})
                assert loader.__name__ == entry[1] and issubclass(loader, (Model, transformers.PreTrainedModel))
                found.add(entry[1])
            except ConfigError as error:
                assert str(entry[1]) in str(error)
                absent.add(entry[1])
    assert {"UNet2DConditionModel", "AutoencoderKL", "CLIPTextModel", "T5EncoderModel"} <= found
