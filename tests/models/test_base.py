"""What every model class does: loading, saving, dtypes, devices, counting."""

import json
import re
import threading
from pathlib import Path
from typing import ClassVar

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffusion_core.errors import ConfigError, KeyMismatchError, MissingFileError, NumericalError, PlacementError
from diffusion_core.models import AutoencoderTiny, ModelMixin, UNet2DModel
from diffusion_core.models.base import Model

NAME = "diffusion_pytorch_model"
TINY_VAE = {
    "encoder_block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "num_encoder_blocks": (1, 1),
    "num_decoder_blocks": (1, 1),
}
TINY_UNET = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}


class Blocks(Model):
    """A bit of everything: a convolution, tied layers, a kept norm, loose parameters, buffers of both kinds."""

    _keep_in_fp32_modules: ClassVar = ["norm"]

    def __init__(self, dim: int = 8, tied: bool = False, sizes: tuple[int, ...] = (1, 2)) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, dim, 3)
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.words = nn.Embedding(5, dim)
        self.scale = nn.Parameter(torch.randn(dim))
        self.loose = nn.Parameter(torch.empty(dim))
        nn.init.normal_(self.loose, std=0.1)
        self.register_buffer("steps", torch.arange(dim))
        self.register_buffer("table", torch.linspace(0, 1, dim), persistent=False)
        self.register_buffer("scratch", torch.empty(dim).fill_(0.5), persistent=False)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.image(x).mean((2, 3)) + self.table.to(x.dtype) + self.scratch.to(x.dtype) + self.loose
        hidden = self.norm(hidden.to(self.norm.weight.dtype)).to(x.dtype)
        return self.second(self.first(hidden)) * self.scale


@pytest.fixture
def saved(tmp_path) -> tuple[Blocks, Path]:
    model = Blocks().eval()
    model.save_pretrained(tmp_path)
    return model, tmp_path


def picture(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def change_weights(folder: Path, change, variant: str = "") -> None:
    path = folder / f"{NAME}{variant}.safetensors"
    content = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(content)
    save_file(content, path)


def assert_defined(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert not tensor.is_meta, name
        assert torch.isfinite(tensor.float()).all() and tensor.float().abs().max() < 100, name


def test_a_round_trip_gives_the_same_numbers_in_eval_mode(saved):
    model, folder = saved
    loaded = Blocks.from_pretrained(folder)
    assert torch.equal(loaded(picture()), model(picture()))
    assert not loaded.training and all(not part.training for part in loaded.modules())
    assert loaded.config == model.config and loaded.config.sizes == [1, 2]
    assert loaded.dtype is torch.float32 and loaded.device == torch.device("cpu")
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert ModelMixin is Model
    assert_defined(loaded)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["5GB", "300B", 10**6])
def test_formats_and_shards_make_no_difference(tmp_path, safe, size):
    model = Blocks().eval()
    model.save_pretrained(tmp_path, safe_serialization=safe, max_shard_size=size)
    loaded = Blocks.from_pretrained(tmp_path, use_safetensors=None if safe else False)
    assert torch.equal(loaded(picture()), model(picture()))


def test_subfolder_variant_and_config_overrides(saved):
    model, folder = saved
    model.to(torch.float16).save_pretrained(folder / "unet", variant="fp16")
    loaded = Blocks.from_pretrained(folder, subfolder="unet", variant="fp16", dtype="auto", sizes=(7,))
    assert loaded.dtype is torch.float16 and loaded.config.sizes == (7,)
    assert loaded.norm.weight.dtype is torch.float32
    with pytest.raises(MissingFileError, match=r"variant='fp16'|fp16"):
        Blocks.from_pretrained(folder, variant="fp16")
    with pytest.raises(MissingFileError, match="no weights in"):
        Blocks.from_pretrained(folder, subfolder="unet")
    (folder / "config.json").unlink()
    with pytest.raises(MissingFileError, match="pass subfolder='unet'"):
        Blocks.from_pretrained(folder)


# Cases 29 and 38: dtypes.
def test_names_of_dtypes_are_taken_by_to() -> None:
    model = Blocks()
    for name, found in (("bfloat16", torch.bfloat16), ("fp16", torch.float16), ("torch.float32", torch.float32)):
        assert model.to(name).dtype == found
        assert model.to("cpu", name).dtype == model.to(dtype=name).dtype == found
    with pytest.raises(ValueError, match="'float63' is no dtype of torch"):
        model.to(dtype="float63")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, torch.float32),
        ({"dtype": "auto"}, torch.float16),
        ({"torch_dtype": "auto"}, torch.float16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"torch_dtype": torch.bfloat16}, torch.bfloat16),
        ({"dtype": torch.float64, "torch_dtype": torch.float16}, torch.float64),
    ],
)
def test_dtypes_are_what_was_asked(saved, asked, expected):
    _, folder = saved
    change_weights(folder, lambda content: content.update({k: t.half() for k, t in content.items() if k != "steps"}))
    loaded = Blocks.from_pretrained(folder, **asked)
    half = expected in {torch.float16, torch.bfloat16}
    assert loaded.dtype is expected and loaded.first.weight.dtype is expected
    assert loaded.norm.weight.dtype is (torch.float32 if half else expected)
    assert loaded.steps.dtype is torch.int64
    assert loaded.table.dtype is torch.float32, "what no file holds keeps its precision"
    assert torch.isfinite(loaded(picture(expected))).all()


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"dtype": "float17"}, ValueError),
        ({"dtype": "int8"}, ValueError),
        ({"dtype": 16}, TypeError),
        ({"dtype": {"default": "auto"}}, TypeError),
    ],
)
def test_bad_dtypes_are_named(saved, asked, kind):
    with pytest.raises(kind, match="dtype"):
        Blocks.from_pretrained(saved[1], **asked)


# Case 25 and the rule that nothing undefined comes out of a load.
def test_all_differences_are_one_error(saved):
    _, folder = saved

    def change(content):
        del content["first.bias"], content["loose"]
        content["extra.weight"] = torch.ones(2)
        content["norm.bias"] = torch.ones(9)
        content["steps"] = torch.ones(8)

    change_weights(folder, change)
    with pytest.raises(KeyMismatchError) as caught:
        Blocks.from_pretrained(folder)
    for text in [
        "2 missing: first.bias, loose",
        "1 unexpected: extra.weight",
        "norm.bias (file [9], model [8])",
        "steps",
        "strict=False",
    ]:
        assert text in str(caught.value)
    assert list(caught.value.missing) == ["first.bias", "loose"] and isinstance(caught.value, OSError)
    with pytest.raises(KeyMismatchError):
        Blocks.from_pretrained(folder, ignore_mismatched_sizes=True)
    loaded, info = Blocks.from_pretrained(folder, strict=False, output_loading_info=True)
    assert info["missing_keys"] == ["first.bias", "loose"] and info["unexpected_keys"] == ["extra.weight"]
    assert {name for name, _, _ in info["mismatched_keys"]} == {"norm.bias", "steps"} and info["error_msgs"] == []
    assert_defined(loaded)
    assert (loaded.norm.bias == 0).all() and torch.equal(loaded.steps, torch.arange(8))
    assert 0 < loaded.first.bias.abs().max() <= 8**-0.5 and loaded.loose.std() < 0.3


@pytest.mark.parametrize(
    "options", [{"strict": False}, {"ignore_mismatched_sizes": True}, {"strict": False, "low_cpu_mem_usage": False}]
)
@pytest.mark.parametrize("dtype", [None, "auto", torch.bfloat16])
def test_mismatched_sizes_get_the_layers_own_init(saved, options, dtype):
    model, folder = saved
    loaded = Blocks.from_pretrained(folder, dim=12, dtype=dtype, **options)
    assert_defined(loaded)
    assert loaded.dtype is (torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)
    assert (loaded.norm.weight == 1).all() and loaded.norm.weight.dtype is torch.float32
    assert loaded.first.weight.abs().max() <= 12**-0.5
    assert model.config.dim == 8 and loaded.config.dim == 12


def test_unexpected_names_that_the_class_expects_are_ignored(saved):
    _, folder = saved
    change_weights(folder, lambda content: content.update({"ema.decay": torch.ones(1)}))

    class Forgiving(Blocks):
        _keys_to_ignore_on_load_unexpected: ClassVar = [r"^ema\."]

    _, info = Forgiving.from_pretrained(folder, output_loading_info=True)
    assert info["unexpected_keys"] == []


def test_a_tensor_of_another_kind_is_refused(saved):
    _, folder = saved
    change_weights(folder, lambda content: content.update({"first.weight": torch.ones(8, 8, dtype=torch.uint8)}))
    with pytest.raises(KeyMismatchError, match=r"first\.weight"):
        Blocks.from_pretrained(folder)


# Case 32: ties.
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["5GB", 300])
def test_shared_tensors_are_stored_once_and_shared_again(tmp_path, safe, size):
    for tied_by_class in (True, False):
        model = Blocks(tied=tied_by_class).eval()
        model.second.weight = model.first.weight
        assert model.num_parameters() == sum({id(p): p.numel() for p in model.parameters()}.values())
        folder = tmp_path / str(tied_by_class)
        model.save_pretrained(folder, safe_serialization=safe, max_shard_size=size)
        loaded = Blocks.from_pretrained(folder, use_safetensors=safe)
        if safe or tied_by_class:
            assert loaded.second.weight is loaded.first.weight
            assert loaded.num_parameters() == model.num_parameters()
            assert loaded.get_memory_footprint() == model.get_memory_footprint()
        assert torch.equal(loaded(picture()), model(picture()))
        converted = Blocks.from_pretrained(folder, use_safetensors=safe, dtype="bfloat16")
        assert torch.equal(converted.second.weight, converted.first.weight)


def test_a_tied_unet_saves_and_loads(tmp_path):
    model = UNet2DModel(**TINY_UNET)
    first, second = [layer for layer in model.modules() if type(layer).__name__ == "Attention"][:2]
    second.to_k.weight = first.to_k.weight
    for size in ("5GB", "4KB"):
        model.save_pretrained(tmp_path, max_shard_size=size)
        loaded = UNet2DModel.from_pretrained(tmp_path)
        assert loaded.num_parameters() == model.num_parameters()
        assert all(
            torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
        )


# Case 43: memory formats.
def test_channels_last_survives_and_other_shapes_do_not_mind(tmp_path):
    class Video(Model):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.video, self.line = nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3), nn.Conv1d(3, 4, 3)

    for memory_format in (torch.channels_last, torch.channels_last_3d):
        model = Video().to(memory_format=memory_format)
        assert model.image.weight.is_contiguous(memory_format=torch.channels_last)
        assert model.video.weight.is_contiguous(memory_format=torch.channels_last_3d)
        assert model.line.weight.is_contiguous()
        for options in ({}, {"dtype": torch.float16}):
            model.save_pretrained(tmp_path)
            loaded = Video.from_pretrained(tmp_path, **options)
            assert loaded.image.weight.stride() == model.image.weight.stride()
            assert loaded.video.weight.stride() == model.video.weight.stride()
            assert torch.equal(loaded.video.weight.float(), model.video.weight.to(loaded.dtype).float())
    plain = model.to(memory_format=torch.contiguous_format)
    assert plain.image.weight.is_contiguous() and plain is model


def test_layers_kept_in_fp32_stay_exact_on_every_way_down(saved):
    model, _ = saved
    exact = model.norm.weight.data.uniform_().clone()
    model.norm.weight.data.copy_(exact)
    parent = nn.Sequential(Blocks())
    parent[0].load_state_dict(model.state_dict())
    for convert in (
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.to(torch.float16, memory_format=torch.channels_last),
    ):
        fresh = Blocks()
        fresh.load_state_dict(model.state_dict())
        convert(fresh)
        assert fresh.norm.weight.dtype is torch.float32 and torch.equal(fresh.norm.weight, exact)
        assert fresh.first.weight.dtype is fresh.dtype is not torch.float32
    parent.half()
    assert torch.equal(parent[0].norm.weight, exact)
    assert parent[0].double().norm.weight.dtype is torch.float64
    assert parent[0].float().dtype is torch.float32


def test_counting(saved):
    model, _ = saved
    total = sum(parameter.numel() for parameter in model.parameters())
    assert model.num_parameters() == total
    assert model.num_parameters(exclude_embeddings=True) == total - 5 * 8
    model.scale.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == total - 8
    assert model.get_memory_footprint(return_buffers=False) == 4 * total
    assert model.get_memory_footprint() == 4 * total + 8 * 8 + 2 * 8 * 4
    assert model.half().get_memory_footprint(return_buffers=False) == 2 * total + 2 * 16


def test_dtype_and_device_never_come_from_placeholders(saved):
    model, _ = saved
    model.first.weight = nn.Parameter(torch.empty(8, 8, device="meta"))
    model.image.weight = nn.Parameter(torch.empty(8, 3, 3, 3, device="meta"))
    assert model.device == torch.device("cpu")
    model.first.weight = nn.Parameter(torch.ones(8, 8).to(torch.float8_e4m3fn), requires_grad=False)
    assert model.dtype is torch.float32
    assert Model().dtype is torch.float32 and Model().device == torch.device("cpu")


@pytest.mark.parametrize("place", ["cpu", torch.device("cpu"), {"": "cpu"}, None])
def test_one_device_is_a_map(saved, place):
    loaded = Blocks.from_pretrained(saved[1], device_map=place)
    assert loaded.device.type == "cpu" and not any(
        part._forward_hooks or part._forward_pre_hooks for part in loaded.modules()
    )
    loaded.to("cpu")


@pytest.mark.parametrize("place", ["cuda:99", "nowhere", {"first": "nowhere"}, "meta", -3, 1.5])
def test_what_is_no_device_is_refused_before_anything_is_read(tmp_path, place):
    with pytest.raises(PlacementError, match="device_map"):
        Blocks.from_pretrained(tmp_path / "absent", device_map=place)


def test_unknown_arguments_and_config_entries(saved, caplog):
    _, folder = saved
    with pytest.raises(TypeError, match=r"takes no dimm; .*dim, sizes, tied"):
        Blocks.from_pretrained(folder, dimm=4)
    Blocks.from_pretrained(folder, proxies=None, low_cpu_mem_usage=False, offload_state_dict=True)
    assert not caplog.text
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "colour": 3}))
    assert Blocks.from_pretrained(folder).config.colour == 3
    assert "ignored: ['colour']" in caplog.text
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ConfigError, match="bitsandbytes"):
        Blocks.from_pretrained(folder)


def test_saving_refuses_files_and_unknown_words(saved, tmp_path):
    model, folder = saved
    with pytest.raises(NotADirectoryError, match="save_directory"):
        model.save_pretrained(folder / "config.json")
    with pytest.raises(TypeError, match="push_to_hub=True"):
        model.save_pretrained(folder, private=True)
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other").exists()


def test_saving_over_the_folder_that_it_came_from(saved):
    model, folder = saved
    loaded = Blocks.from_pretrained(folder)
    for size in ("5GB", 300, "5GB"):
        loaded.save_pretrained(folder, max_shard_size=size)
        assert torch.equal(loaded(picture()), model(picture()))
        assert torch.equal(Blocks.from_pretrained(folder)(picture()), model(picture()))


def test_changing_loaded_weights_changes_no_file(saved):
    model, folder = saved
    loaded = Blocks.from_pretrained(folder)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    assert torch.equal(Blocks.from_pretrained(folder)(picture()), model(picture()))


# Case 28.
def test_damage_is_found_when_asked_for(saved):
    model, folder = saved
    model.save_pretrained(folder, checksum=True)
    Blocks.from_pretrained(folder, verify_checksum=True, check_finite=True)
    change_weights(folder, lambda content: content["scale"].__setitem__(3, float("nan")))
    Blocks.from_pretrained(folder)
    with pytest.raises(NumericalError, match="scale"):
        Blocks.from_pretrained(folder, check_finite=True)
    with pytest.raises(ValueError, match="holds no hash"):
        Blocks.from_pretrained(folder, verify_checksum=True)


def test_compiled_parts_keep_plain_names(saved):
    model, folder = saved
    model.first = torch.compile(model.first, backend="eager")
    model.save_pretrained(folder)
    assert "first.weight" in load_file(folder / f"{NAME}.safetensors")
    compiled = torch.compile(Blocks.from_pretrained(folder), backend="eager", fullgraph=True)
    compiled(picture())
    compiled.save_pretrained(folder / "again")
    assert json.loads((folder / "again" / "config.json").read_text())["_class_name"] == "Blocks"


def test_a_constructor_that_looks_at_its_weights_works(tmp_path):
    class Curious(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.norm = float(self.layer.weight.detach().norm())

    model = Curious()
    model.save_pretrained(tmp_path)
    assert torch.equal(Curious.from_pretrained(tmp_path).layer.weight, model.layer.weight)


# Old names of attention layers, sharded or not.
@pytest.mark.parametrize("size", ["5GB", "4KB"])
@pytest.mark.parametrize("safe", [True, False])
def test_old_attention_names_are_understood(tmp_path, size, safe):
    model = UNet2DModel(**TINY_UNET).eval()
    model.save_pretrained(tmp_path, max_shard_size=size, safe_serialization=safe)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def older(name: str) -> str:
        return re.sub(r"\.(to_q|to_k|to_v|to_out\.0)\.", lambda found: f".{old[found[1]]}.", name)

    for path in tmp_path.iterdir():
        if path.suffix == ".safetensors":
            save_file({older(name): tensor.clone() for name, tensor in load_file(path).items()}, path)
        elif path.suffix == ".bin":
            torch.save({older(name): tensor for name, tensor in torch.load(path).items()}, path)
        elif path.name.endswith(".index.json"):
            index = json.loads(path.read_text())
            path.write_text(json.dumps({"weight_map": {older(k): v for k, v in index["weight_map"].items()}}))
    loaded = UNet2DModel.from_pretrained(tmp_path, use_safetensors=safe)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


# Interchange with the reference, both ways.
PAIRS = [(AutoencoderTiny, diffusers.AutoencoderTiny, TINY_VAE), (UNet2DModel, diffusers.UNet2DModel, TINY_UNET)]


def run(model: nn.Module) -> torch.Tensor:
    sample = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    with torch.no_grad():
        return (model(sample, 3) if "UNet" in type(model).__name__ else model(sample)).sample.float()


@pytest.mark.parametrize(("ours", "theirs", "config"), PAIRS, ids=["vae", "unet"])
@pytest.mark.parametrize("size", ["5GB", "4KB"])
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_checkpoints_go_both_ways(tmp_path, ours, theirs, config, size, variant):
    reference = theirs(**config).eval()
    reference.save_pretrained(tmp_path / "theirs", max_shard_size=size, variant=variant)
    here = ours.from_pretrained(tmp_path / "theirs", variant=variant)
    assert (run(here) - run(reference)).abs().max() < 1e-5
    here.save_pretrained(tmp_path / "ours", max_shard_size=size, variant=variant)
    there = theirs.from_pretrained(tmp_path / "ours", variant=variant)
    assert all(torch.equal(there.state_dict()[name], tensor) for name, tensor in reference.state_dict().items())
    assert (run(there) - run(reference)).abs().max() < 1e-6
    assert {p.name for p in (tmp_path / "ours").iterdir() if "of" not in p.name} == {
        p.name for p in (tmp_path / "theirs").iterdir() if "of" not in p.name
    }
    written, original = (json.loads((tmp_path / who / "config.json").read_text()) for who in ("ours", "theirs"))
    assert {key: value for key, value in written.items() if key in original} == original


def test_bin_checkpoints_of_the_reference_load(tmp_path):
    reference = diffusers.AutoencoderTiny(**TINY_VAE).eval()
    for size in ("5GB", "4KB"):
        reference.save_pretrained(tmp_path, safe_serialization=False, max_shard_size=size)
        assert (run(AutoencoderTiny.from_pretrained(tmp_path)) - run(reference)).abs().max() < 1e-6


def test_threads_load_side_by_side(saved):
    model, folder = saved
    expected, results, failures = model(picture()), [], []

    def load(dtype: torch.dtype) -> None:
        try:
            for _ in range(5):
                loaded = Blocks.from_pretrained(folder, dtype=dtype)
                assert loaded.dtype is dtype
                assert_defined(loaded)
                results.append((loaded(picture(dtype)).float() - expected).abs().max() < 0.1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=(dtype,)) for dtype in (torch.float32, torch.bfloat16) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(results) == 20 and all(results)


def test_uploading_hands_over_a_whole_folder(saved, monkeypatch):
    model, _ = saved
    calls = []
    monkeypatch.setattr(
        "huggingface_hub.create_repo", lambda repo, **kwargs: type("Url", (), {"repo_id": f"me/{repo}"})
    )

    def upload(repo_id, folder_path, **kwargs):
        calls.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir()), kwargs))
        return "https://hub/commit/1"

    monkeypatch.setattr("huggingface_hub.upload_folder", upload)
    assert model.push_to_hub("blocks", variant="fp16") == "https://hub/commit/1"
    files = ["config.json", f"{NAME}.fp16.safetensors"]
    assert calls == [("me/blocks", files, {"commit_message": "Upload Blocks"})]


@pytest.mark.slow
def test_loading_a_gigabyte_stays_within_its_memory(tmp_path):
    from benchmarks.load_memory import run_cases

    for name, result in run_cases(str(tmp_path)).items():
        print(f"{name}: peak {result['peak'] / 1e6:.1f} MB, limit {result['limit'] / 1e6:.1f} MB")
        assert result["peak"] <= result["limit"], name
