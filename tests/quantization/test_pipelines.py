"""Pipelines with quantised components: chosen, loaded, described, saved, and run."""

import diffusers
import pytest
import torch
import transformers
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

import diffusion_core
from diffusion_core import FluxPipeline, PipelineQuantizationConfig, TorchAoConfig, describe
from diffusion_core.errors import UnsupportedError
from diffusion_core.offload.quantized import is_quantized
from tests.pipelines import flux
from tests.quantization.models import kinds

INT8 = {"quant_type": Int8WeightOnlyConfig()}
CALL = {"prompt": "a red cat", "height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline")
    flux.pipe().save_pretrained(path)
    return path


def load(folder, *args, **kwargs):
    config = PipelineQuantizationConfig(*args, **kwargs)
    return FluxPipeline.from_pretrained(folder, quantization_config=config, torch_dtype=torch.bfloat16)


def draw(pipe):
    return pipe(**CALL, generator=torch.Generator().manual_seed(0)).images


def quantised(pipe):
    return {name for name, part in pipe.components.items() if isinstance(part, torch.nn.Module) and is_quantized(part)}


def test_by_backend(folder):
    pipe = load(folder, "torchao", INT8, ["transformer", "text_encoder_2"])
    assert quantised(pipe) == {"transformer", "text_encoder_2"}
    assert quantised(load(folder, "torchao", INT8, "transformer")) == {"transformer"}
    assert quantised(load(folder, "torchao", INT8)) == {"transformer", "text_encoder", "text_encoder_2"}
    assert torch.isfinite(draw(pipe)).all()


def test_by_mapping_as_the_reference(folder):
    ours = load(
        folder,
        quant_mapping={
            "transformer": TorchAoConfig(Int8DynamicActivationInt8WeightConfig(), []),
            "text_encoder_2": transformers.TorchAoConfig(Int8WeightOnlyConfig()),
        },
    )
    theirs = diffusers.FluxPipeline.from_pretrained(
        folder,
        quantization_config=diffusers.PipelineQuantizationConfig(
            quant_mapping={
                "transformer": diffusers.TorchAoConfig(Int8DynamicActivationInt8WeightConfig()),
                "text_encoder_2": transformers.TorchAoConfig(Int8WeightOnlyConfig()),
            }
        ),
        torch_dtype=torch.bfloat16,
    )
    for name in ("transformer", "text_encoder_2"):
        assert kinds(getattr(ours, name)) == kinds(getattr(theirs, name)) != {}
    embeds = [
        pipe.encode_prompt(prompt="a red cat", prompt_2=None, device=torch.device("cpu"))[0] for pipe in (ours, theirs)
    ]
    assert torch.equal(*embeds)
    assert (draw(ours) - draw(theirs)).abs().max() < 0.02  # both in bfloat16


def test_saved_and_loaded(folder, tmp_path):
    pipe = load(folder, "torchao", INT8, ["transformer", "text_encoder_2"])
    expected = draw(pipe)
    pipe.save_pretrained(tmp_path)
    again = FluxPipeline.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert quantised(again) == {"transformer", "text_encoder_2"}
    assert torch.equal(draw(again), expected)
    theirs = diffusers.FluxPipeline.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert kinds(theirs.transformer) == kinds(pipe.transformer)


def test_it_is_described(folder, tmp_path):
    pipe = load(folder, "torchao", INT8, ["transformer"])
    line = next(line for line in str(pipe).splitlines() if " transformer:" in line)
    assert f"{FluxPipeline.from_pretrained(folder).transformer.num_parameters():,} parameters" in line
    assert f"quantized: {len(kinds(pipe.transformer))} x Int8Tensor" in line
    pipe.save_pretrained(tmp_path)
    found = {each.name: each for each in describe(tmp_path).components}
    assert found["transformer"].parameters == pipe.transformer.num_parameters()
    assert found["transformer"].dtypes.keys() == {"Int8Tensor", "bfloat16"}


def test_a_cast_changes_nothing_at_all(folder):
    pipe = load(folder, "torchao", INT8, ["text_encoder_2"])
    with pytest.raises(ValueError, match=r"text_encoder_2.*float16"):
        pipe.to(torch.float16)
    assert pipe.transformer.dtype == torch.bfloat16
    pipe.to(torch.bfloat16)


def test_without_a_dtype(folder):
    pipe = FluxPipeline.from_pretrained(
        folder, quantization_config=PipelineQuantizationConfig("torchao", INT8, ["transformer"])
    )
    assert pipe.transformer.dtype == torch.bfloat16
    assert pipe.vae.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "either quant_backend"),
        ({"quant_backend": "torchao", "quant_mapping": {}}, ValueError, "either quant_backend"),
        ({"quant_backend": "torchao"}, ValueError, "needs quant_type"),
        ({"quant_backend": "torchao", "quant_kwargs": {"quant_type": "int8wo"}}, TypeError, "int8wo"),
        ({"quant_backend": "bitsandbytes_4bit", "quant_kwargs": {}}, UnsupportedError, "TorchAoConfig"),
        ({"quant_mapping": {"transformer": 3}}, TypeError, "must be a TorchAoConfig"),
        ({"quant_mapping": {}, "quant_kwargs": {"a": 1}}, ValueError, "quant_mapping says it all"),
    ],
)
def test_configurations_that_make_no_sense(arguments, error, message):
    with pytest.raises(error, match=message):
        PipelineQuantizationConfig(**arguments)


def test_components_that_are_not_there_or_have_no_such_weights(folder):
    for name, message in (("transformr", "components to load are"), ("scheduler", "is not quantised")):
        with pytest.raises(ValueError, match=message):
            load(folder, "torchao", INT8, [name])
    with pytest.raises(TypeError, match="PipelineQuantizationConfig"):
        FluxPipeline.from_pretrained(folder, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))


def test_familiar_path():
    from diffusion_core.quantizers import PipelineQuantizationConfig as FromThere

    assert FromThere is diffusion_core.PipelineQuantizationConfig
