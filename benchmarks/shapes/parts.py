"""The parts of the embedded model besides its autoencoder: tokenizer, text encoder, denoiser, scheduler."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion_core.models import UNet2DConditionModel
from diffusion_core.schedulers import DDIMScheduler

from .scenes import COLORS, RADII, SHAPES

if TYPE_CHECKING:
    from transformers import CLIPTextModel, CLIPTokenizer

TOKENS = 32  # the longest caption takes 17
WORDS = ("a", "on", "background", "of", "to", "the", "above", "below", "left", "right", *COLORS, *SHAPES, *RADII)
BEGIN, END = "<|startoftext|>", "<|endoftext|>"

UNET = {
    "sample_size": 8,
    "in_channels": 8,
    "out_channels": 8,
    "block_out_channels": (96, 160),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D",) * 2,
    "up_block_types": ("CrossAttnUpBlock2D",) * 2,
    "cross_attention_dim": 128,
    "attention_head_dim": 4,  # four heads: the config's old name for their number
    "norm_num_groups": 16,
}
# Stable Diffusion's schedule with a higher end: the last step keeps 1.5% of the signal instead of 7%, so that
# sampling may start from pure noise without a bias of the background colour, and sigma_max stays at 65.
SCHEDULER = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.02,
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "clip_sample": False,
    "set_alpha_to_one": True,
}


def write_tokenizer(folder: Path) -> None:
    """Write a CLIP tokenizer whose merges make one token of each word that captions use; others are spelt out."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=2000, end_of_word_suffix="</w>", show_progress=False)  # type: ignore[call-arg]
    learner.train_from_iterator([" ".join(WORDS)] * 5, trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), *map("".join, merges), BEGIN, END]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in merges))
    special = {"bos_token": BEGIN, "eos_token": END, "unk_token": END, "pad_token": END}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": TOKENS, "do_lower_case": True, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def load_tokenizer(folder: Path) -> "CLIPTokenizer":
    from transformers import CLIPTokenizer

    if not (folder / "vocab.json").exists():
        write_tokenizer(folder)
    return CLIPTokenizer.from_pretrained(folder)


def make_text_encoder(tokenizer: "CLIPTokenizer") -> "CLIPTextModel":
    """A CLIP text model of 0.6 M parameters, trained together with the denoiser."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=UNET["cross_attention_dim"],
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def make_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(**UNET)


def make_scheduler() -> DDIMScheduler:
    return DDIMScheduler(**SCHEDULER)
