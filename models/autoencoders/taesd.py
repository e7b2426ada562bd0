"""TAESD's own files (github.com/madebyollin/taesd) as a config and weights of `AutoencoderTiny`.

The files number the layers of encoder and decoder from 0. The decoder's layer 0 holds the latents in range and has no
weights; here that is part of `forward`, so the decoder's numbers are one less.
"""

import os
from pathlib import Path
from typing import Any

import torch

from diffusion_core.errors import CorruptFileError, KeyMismatchError, MissingFileError


def load_taesd(
    encoder_path: str | os.PathLike[str], decoder_path: str | os.PathLike[str]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read both files and infer the config: widths, blocks and whether the middle blocks pool.

    Returns:
        The config's entries that these weights decide, and the weights in float32 under the model's names.

    Raises:
        MissingFileError: if a file is not there.
        CorruptFileError: if a file is not safetensors.
        KeyMismatchError: if a file is of another architecture.
    """
    encoder, decoder = _read(encoder_path, first=0), _read(decoder_path, first=1)
    encoder_blocks, decoder_blocks = _stages(encoder), _stages(decoder)
    config = {
        "in_channels": encoder["0.weight"].shape[1],
        "out_channels": len(decoder[f"{_layers(decoder)[-1]}.weight"]),
        "encoder_block_out_channels": (len(encoder["0.weight"]),) * len(encoder_blocks),
        "decoder_block_out_channels": (len(decoder["1.weight"]),) * len(decoder_blocks),
        "latent_channels": decoder["1.weight"].shape[1],
        "num_encoder_blocks": encoder_blocks,
        "num_decoder_blocks": decoder_blocks,
        "mid_block_pool": any(".pool." in name for name in encoder),
    }
    weights = {f"encoder.layers.{name}": tensor.float() for name, tensor in encoder.items()}
    for name, tensor in decoder.items():
        layer, _, rest = name.partition(".")
        weights[f"decoder.layers.{int(layer) - 1}.{rest}"] = tensor.float()
    return config, weights


def _read(path: str | os.PathLike[str], first: int) -> dict[str, torch.Tensor]:
    """The tensors of a file whose layers are numbered from `first` and end with a convolution."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not Path(path).is_file():
        raise MissingFileError(f"no file {os.fspath(path)}")
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise CorruptFileError(f"{os.fspath(path)} is not a safetensors file: {error}") from error
    numbered = all(name.split(".")[0].isdigit() for name in weights)
    ends = {f"{layer}.weight" for layer in (first, *(_layers(weights)[-1:] if numbered else ()))}
    if not numbered or not ends <= weights.keys() or any(weights[name].dim() != 4 for name in ends):
        raise KeyMismatchError(f"{os.fspath(path)} does not hold numbered layers from {first} as TAESD's files do")
    return weights


def _layers(weights: dict[str, torch.Tensor]) -> list[int]:
    return sorted({int(name.split(".")[0]) for name in weights})


def _stages(weights: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """How many blocks each stage has. The convolutions between stages are those without a bias."""
    counts = [0]
    for layer in _layers(weights):
        if f"{layer}.conv.0.weight" in weights:
            counts[-1] += 1
        elif f"{layer}.bias" not in weights:
            counts.append(0)
    return tuple(counts)
