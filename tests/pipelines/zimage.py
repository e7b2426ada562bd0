"""The parts of a tiny Z-Image, in this library or in the reference."""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3Model

from . import qwen, tiny

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if enable_thinking %}think{% endif %}"
)


@cache
def tokenizer() -> Any:
    made = type(qwen.tokenizer()).from_pretrained(qwen.tokenizer().name_or_path)
    made.chat_template = TEMPLATE
    return made


def text_encoder(seed: int = 7) -> Any:
    """A language model of width 16 for the tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3Model(config).eval()


def transformer(library: ModuleType, **changes: Any) -> Any:
    torch.manual_seed(4)
    config = {
        "in_channels": 4,
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 16,
        "axes_dims": [4, 6, 6],
        "axes_lens": [512, 32, 32],
    }
    made = library.ZImageTransformer2DModel(**{**config, **changes}).eval()
    for parameter in (made.x_pad_token, made.cap_pad_token):
        parameter.data.normal_(0, 0.2)
    return made


def parts(library: ModuleType) -> dict[str, Any]:
    vae = {"shift_factor": 0.1, "scaling_factor": 0.4, "use_quant_conv": False, "use_post_quant_conv": False}
    return {
        "scheduler": library.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": tiny.vae(library, **vae),
        "text_encoder": text_encoder(),
        "tokenizer": tokenizer(),
        "transformer": transformer(library),
    }


def embed(made: Any, prompts: list[str], negatives: list[str]) -> dict[str, Any]:
    names = ("prompt_embeds", "negative_prompt_embeds")
    return dict(zip(names, made.encode_prompt(prompts, negative_prompt=negatives), strict=True))
