"""Every model class in tiny, with what it is called with by step, prompt and size: data for `benchmarks.graphs`.

A new model class is an entry of `SUBJECTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import diffusion_core

Inputs = dict[str, Any]
STEPS = (999.0, 740.0, 260.0, 3.0)  # of 1000
WORDS = (5, 7)  # tokens of two prompts
SIZES = ((8, 8), (8, 12), (16, 20))  # latent pixels; the first is a square, which is where sizes could be mistaken
BATCH = 2


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Subject:
    """A model class.

    Attributes:
        name: of the class.
        config: small.
        inputs: what a call is given, by step, tokens of the prompt, and height and width in latent pixels.
        method: what is called and compiled.
        variant: tells two entries of one class apart.
        steps, words, sizes: the calls.
    """

    name: str
    config: Inputs
    inputs: Callable[[float, int, int, int], Inputs]
    method: str = "forward"
    variant: str = ""
    steps: tuple[float, ...] = STEPS
    words: tuple[int, ...] = WORDS
    sizes: tuple[tuple[int, int], ...] = SIZES
    make: Callable[[Subject], torch.nn.Module] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        method = "" if self.method == "forward" else f".{self.method}"
        return f"{self.name}{method}" + (f" ({self.variant})" if self.variant else "")

    @property
    def kind(self) -> Any:
        """The class."""
        return getattr(diffusion_core, self.name)

    def model(self) -> Any:
        """The model, with random weights of which none is zero."""
        torch.manual_seed(0)
        made = self.make(self) if self.make else self.kind(**self.config)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        return made.eval()

    def calls(self) -> list[Inputs]:
        """The arguments of all calls: every step of every prompt at every size."""
        return [
            self.inputs(step, words, height, width)
            for height, width in self.sizes
            for words in self.words
            for step in self.steps
        ]

    def calls_of_one_size(self) -> list[Inputs]:
        """Every step of prompts that are padded to the same number of tokens, at one size."""
        (height, width), words = self.sizes[1], self.words[-1]
        return [self.inputs(step, words, height, width) for _ in self.words for step in self.steps]


# ---- UNets and what steers them ----

UNET: Inputs = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}
CONTROL: Inputs = {**UNET, "conditioning_embedding_out_channels": (4, 6, 8)}


def unet(step: float, words: int, height: int, width: int) -> Inputs:
    return {
        "sample": seeded(BATCH, 4, height, width),
        "timestep": torch.tensor(step),
        "encoder_hidden_states": seeded(BATCH, words, 12, seed=words),
    }


def unet_xl(step: float, words: int, height: int, width: int) -> Inputs:
    added = {"text_embeds": seeded(BATCH, 6, seed=words), "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * BATCH)}
    return {**unet(step, words, height, width), "added_cond_kwargs": added}


def plain_unet(step: float, words: int, height: int, width: int) -> Inputs:
    return {"sample": seeded(BATCH, 3, height, width), "timestep": torch.tensor(step)}


def control(step: float, words: int, height: int, width: int) -> Inputs:
    return {**unet(step, words, height, width), "controlnet_cond": seeded(BATCH, 3, 4 * height, 4 * width)}


def controls(step: float, words: int, height: int, width: int) -> Inputs:
    one = control(step, words, height, width)
    return {**one, "controlnet_cond": [one["controlnet_cond"]] * 2, "conditioning_scale": [0.5, 1.0]}


def two_controlnets(subject: Subject) -> torch.nn.Module:
    nets = [diffusion_core.ControlNetModel(**subject.config) for _ in range(2)]
    return diffusion_core.MultiControlNetModel(nets)


# ---- transformers of pictures ----

HEADS: Inputs = {"num_attention_heads": 2, "attention_head_dim": 16}
FLUX: Inputs = {
    **HEADS,
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "axes_dims_rope": (4, 6, 6),
}


def flux(step: float, words: int, height: int, width: int) -> Inputs:
    rows, columns = height // 2, width // 2
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
    return {
        "hidden_states": seeded(BATCH, rows * columns, 8),
        "encoder_hidden_states": seeded(BATCH, words, 12, seed=words),
        "pooled_projections": seeded(BATCH, 10, seed=words),
        "timestep": torch.full((BATCH,), step / 1000),
        "img_ids": torch.cat([torch.zeros(rows * columns, 1), grid], dim=1),
        "txt_ids": torch.zeros(words, 3),
    }


def flux_guided(step: float, words: int, height: int, width: int) -> Inputs:
    return {**flux(step, words, height, width), "guidance": torch.full((BATCH,), 3.5)}


def flux_control(step: float, words: int, height: int, width: int) -> Inputs:
    given = flux(step, words, height, width)
    return {**given, "controlnet_cond": seeded(*given["hidden_states"].shape, seed=4)}


def flux_controls(step: float, words: int, height: int, width: int) -> Inputs:
    given = flux_control(step, words, height, width)
    pictures = {"controlnet_cond": [given["controlnet_cond"]] * 2, "controlnet_mode": [None, None]}
    return {**given, **pictures, "conditioning_scale": [0.5, 1.0]}


def two_flux_controlnets(subject: Subject) -> torch.nn.Module:
    nets = [diffusion_core.FluxControlNetModel(**subject.config) for _ in range(2)]
    return diffusion_core.FluxMultiControlNetModel(nets)


def sd3(step: float, words: int, height: int, width: int) -> Inputs:
    return {
        "hidden_states": seeded(BATCH, 4, height, width),
        "encoder_hidden_states": seeded(BATCH, words, 12, seed=words),
        "pooled_projections": seeded(BATCH, 10, seed=words),
        "timestep": torch.full((BATCH,), step),
    }


def qwen(step: float, words: int, height: int, width: int) -> Inputs:
    rows, columns = height // 2, width // 2
    return {
        "hidden_states": seeded(BATCH, rows * columns, 8),
        "encoder_hidden_states": seeded(BATCH, words, 12, seed=words),
        "encoder_hidden_states_mask": torch.ones(BATCH, words, dtype=torch.long),
        "timestep": torch.full((BATCH,), step / 1000),
        "img_shapes": [[(1, rows, columns)]] * BATCH,
    }


def auraflow(step: float, words: int, height: int, width: int) -> Inputs:
    return {
        "hidden_states": seeded(BATCH, 4, height, width),
        "encoder_hidden_states": seeded(BATCH, words, 12, seed=words),
        "timestep": torch.full((BATCH,), step / 1000),
    }


def pixart(step: float, words: int, height: int, width: int) -> Inputs:
    mask = torch.ones(BATCH, words)
    mask[1, 3:] = 0
    return {
        "hidden_states": seeded(BATCH, 4, height, width),
        "encoder_hidden_states": seeded(BATCH, words, 20, seed=words),
        "encoder_attention_mask": mask,
        "timestep": torch.full((BATCH,), step).long(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def redux(step: float, words: int, height: int, width: int) -> Inputs:
    return {"x": seeded(BATCH, height * width, 6)}


# ---- transformers of films ----


def cogvideox(step: float, words: int, height: int, width: int) -> Inputs:
    angles = seeded(3 * (height // 2) * (width // 2), 8, seed=2)
    return {
        "hidden_states": seeded(BATCH, 3, 4, height, width),
        "encoder_hidden_states": seeded(BATCH, words, 12, seed=words),
        "timestep": torch.full((BATCH,), step).long(),
        "image_rotary_emb": tuple(part.repeat_interleave(2, 1) for part in (angles.cos(), angles.sin())),
    }


def cogvideox_2b(step: float, words: int, height: int, width: int) -> Inputs:
    given = cogvideox(step, words, height, width)
    del given["image_rotary_emb"]
    return given


def wan(step: float, words: int, height: int, width: int) -> Inputs:
    return {
        "hidden_states": seeded(BATCH, 4, 3, height, width),
        "encoder_hidden_states": seeded(BATCH, 2 * words, 12, seed=words),
        "timestep": torch.full((BATCH,), step).long(),
    }


def wan_image(step: float, words: int, height: int, width: int) -> Inputs:
    return {**wan(step, words, height, width), "encoder_hidden_states_image": seeded(BATCH, 5, 10, seed=2)}


def ltx(step: float, words: int, height: int, width: int) -> Inputs:
    return {
        "hidden_states": seeded(BATCH, 2 * height * width, 4),
        "encoder_hidden_states": seeded(BATCH, words, 12, seed=words),
        "encoder_attention_mask": (torch.arange(words) < torch.tensor([[words], [3]])).long(),
        "timestep": torch.full((BATCH,), step).long(),
        "num_frames": 2,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32.0, 32.0),
    }


def hunyuan(step: float, words: int, height: int, width: int) -> Inputs:
    mask = torch.ones(BATCH, words, dtype=torch.long)
    mask[1, 3:] = 0
    return {
        "hidden_states": seeded(BATCH, 4, 3, height, width),
        "encoder_hidden_states": seeded(BATCH, words, 12, seed=words),
        "encoder_attention_mask": mask,
        "pooled_projections": seeded(BATCH, 10, seed=words),
        "guidance": torch.full((BATCH,), 6000.0),
        "timestep": torch.full((BATCH,), step).long(),
    }


def z_image(step: float, words: int, height: int, width: int) -> Inputs:
    return {
        "x": list(seeded(BATCH, 4, 1, height, width)),
        "t": torch.full((BATCH,), 1 - step / 1000),
        "cap_feats": list(seeded(BATCH, words, 12, seed=words)),
    }


# ---- autoencoders: a step or a prompt means nothing to them ----

ONCE: Inputs = {"steps": (0.0,), "words": (0,)}
KL: Inputs = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 4,
}
ASYMMETRIC: Inputs = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "down_block_out_channels": (8, 16),
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "up_block_out_channels": (12, 16),
    "norm_num_groups": 4,
}
TAESD: Inputs = {
    "encoder_block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "num_encoder_blocks": (1, 2),
    "num_decoder_blocks": (2, 1),
}
WAN_VAE: Inputs = {
    "base_dim": 6,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
    "scale_factor_spatial": 4,
}
QWEN_VAE: Inputs = {
    "base_dim": 8,
    "z_dim": 4,
    "num_res_blocks": 1,
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}
COG_VAE: Inputs = {
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
    "sample_height": 192,
    "sample_width": 320,
}
LTX_VAE: Inputs = {
    "block_out_channels": (4, 8, 8, 8),
    "decoder_block_out_channels": (4, 8, 8, 8),
    "layers_per_block": (1,) * 5,
    "decoder_layers_per_block": (1,) * 5,
    "latent_channels": 4,
}
LTX_VAE_TIMED: Inputs = {
    "block_out_channels": (8, 16, 16, 16),
    "decoder_block_out_channels": (8, 16, 32),
    "layers_per_block": (2, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 2, 1, 1),
    "latent_channels": 4,
    "decoder_spatio_temporal_scaling": (True,) * 3,
    "decoder_inject_noise": (False,) * 4,
    "upsample_residual": (True,) * 3,
    "upsample_factor": (2, 2, 2),
    "timestep_conditioning": True,
}


HUNYUAN_VAE: Inputs = {
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
WAN_VAE_5B: Inputs = WAN_VAE | {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2}


def latents(step: float, words: int, height: int, width: int) -> Inputs:
    return {"z": seeded(BATCH, 4, height, width)}


def tiny_latents(step: float, words: int, height: int, width: int) -> Inputs:
    return {"x": seeded(BATCH, 4, height, width)}


def picture(step: float, words: int, height: int, width: int) -> Inputs:
    return {"x": seeded(BATCH, 3, 2 * height, 2 * width)}


def sample(step: float, words: int, height: int, width: int) -> Inputs:
    return {"sample": seeded(BATCH, 3, 2 * height, 2 * width)}


def film_latents(step: float, words: int, height: int, width: int) -> Inputs:
    return {"z": seeded(1, 4, 2, height // 2, width // 2)}


def timed_latents(step: float, words: int, height: int, width: int) -> Inputs:
    return {**film_latents(step, words, height, width), "temb": torch.full((1,), 0.05)}


def long_film(step: float, words: int, height: int, width: int) -> Inputs:
    return {"x": seeded(1, 3, 9, 8 * height, 8 * width)}


def film(step: float, words: int, height: int, width: int) -> Inputs:
    # All on one side of the size where torch chooses another convolution on CPUs, which is a graph of its own.
    return {"x": seeded(1, 3, 5, 2 * height, 2 * width)}


def autoencoder(name: str, config: Inputs, encode: Any, decode: Any) -> list[Subject]:
    return [Subject(name, config, encode, "encode", **ONCE), Subject(name, config, decode, "decode", **ONCE)]


SUBJECTS = [
    Subject("UNet2DConditionModel", UNET | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}, unet),
    Subject(
        "UNet2DConditionModel",
        UNET
        | {
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 6 + 6 * 8,
            "transformer_layers_per_block": (1, 2),
            "use_linear_projection": True,
        },
        unet_xl,
        variant="SDXL",
    ),
    Subject(
        "UNet2DModel",
        {
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        plain_unet,
        words=(0,),
    ),
    Subject("ControlNetModel", CONTROL, control),
    Subject("MultiControlNetModel", CONTROL, controls, make=two_controlnets),
    Subject("FluxTransformer2DModel", FLUX, flux, variant="schnell"),
    Subject("FluxTransformer2DModel", FLUX | {"guidance_embeds": True}, flux_guided, variant="dev"),
    Subject("FluxControlNetModel", FLUX, flux_control),
    Subject("FluxMultiControlNetModel", FLUX, flux_controls, make=two_flux_controlnets),
    Subject("ReduxImageEncoder", {"redux_dim": 6, "txt_in_features": 8}, redux, words=(0,), steps=(0.0,)),
    Subject(
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 12,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 10,
            "pos_embed_max_size": 16,
            "qk_norm": "rms_norm",
            "dual_attention_layers": (0,),
        },
        sd3,
    ),
    Subject(
        "QwenImageTransformer2DModel",
        {
            **HEADS,
            "in_channels": 8,
            "out_channels": 2,
            "num_layers": 2,
            "joint_attention_dim": 12,
            "axes_dims_rope": (4, 6, 6),
        },
        qwen,
    ),
    Subject(
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 8,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 12,
            "caption_projection_dim": 16,
            "pos_embed_max_size": 256,
        },
        auraflow,
    ),
    Subject(
        "PixArtTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 2,
            "cross_attention_dim": 24,
            "caption_channels": 20,
            "sample_size": 16,
        },
        pixart,
    ),
    Subject(
        "CogVideoXTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 12,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "max_text_seq_length": 7,
            "use_rotary_positional_embeddings": True,
        },
        cogvideox,
        variant="5b",
    ),
    Subject(
        "WanTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 12,
            "freq_dim": 16,
            "ffn_dim": 24,
            "num_layers": 2,
        },
        wan,
        variant="text",
    ),
    Subject(
        "WanTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 12,
            "freq_dim": 16,
            "ffn_dim": 24,
            "num_layers": 2,
            "image_dim": 10,
            "added_kv_proj_dim": 32,
        },
        wan_image,
        variant="image",
    ),
    Subject(
        "LTXVideoTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 32,
            "num_layers": 2,
            "caption_channels": 12,
        },
        ltx,
    ),
    Subject("AutoencoderKL", KL, sample, **ONCE),
    Subject(
        "HunyuanVideoTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": 12,
            "pooled_projection_dim": 10,
            "rope_axes_dim": (4, 6, 6),
        },
        hunyuan,
    ),
    Subject(
        "ZImageTransformer2DModel",
        {
            "in_channels": 4,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 12,
            "axes_dims": (4, 6, 6),
            "axes_lens": (512, 32, 32),
        },
        z_image,
    ),
    *autoencoder("AutoencoderKL", KL, picture, latents),
    *autoencoder("AsymmetricAutoencoderKL", ASYMMETRIC, picture, latents),
    *autoencoder("AutoencoderTiny", TAESD, picture, tiny_latents),
    *autoencoder("AutoencoderKLQwenImage", QWEN_VAE, film, film_latents),
    *autoencoder("AutoencoderKLWan", WAN_VAE, film, film_latents),
    Subject("AutoencoderKLWan", WAN_VAE_5B, film_latents, "decode", "2.2 5B", **ONCE),
    *autoencoder("AutoencoderKLCogVideoX", COG_VAE, film, film_latents),
    *autoencoder("AutoencoderKLHunyuanVideo", HUNYUAN_VAE, film, film_latents),
    *autoencoder("AutoencoderKLLTXVideo", LTX_VAE, long_film, film_latents),
    Subject("AutoencoderKLLTXVideo", LTX_VAE_TIMED, timed_latents, "decode", "0.9.1", **ONCE),
]
