"""Latents: their sizes, the noise they start from, and the way through the autoencoder in both directions."""

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from diffusion_core.images import require_finite
from diffusion_core.logging import get_logger
from diffusion_core.randomness import Generators, randn_tensor

logger = get_logger(__name__)

# An autoencoder changes its dtype while it is upcast, which threads that share it must not see.
_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def check_size(height: int, width: int, factor: int) -> None:
    """Refuse a picture size that is not a positive multiple of the autoencoder's scale.

    Raises:
        ValueError: naming the nearest size that fits.
    """
    for name, value in (("height", height), ("width", width)):
        if not isinstance(value, int) or value <= 0 or value % factor:
            fits = max(round(value / factor), 1) * factor if isinstance(value, int | float) else factor
            raise ValueError(f"{name}={value!r} must be a positive multiple of {factor}, such as {fits}")


def check_latents(latents: torch.Tensor, expected: tuple[int, ...], name: str = "latents") -> None:
    """Refuse latents of another shape than the call works with; the message states the shape expected."""
    if not isinstance(latents, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of shape {expected}, not {type(latents).__name__}")
    if tuple(latents.shape) != expected:
        parts = {3: "tokens, channels of a token", 5: "the other axes of a film's latents"}.get(
            len(expected), "channels, height and width divided by the autoencoder's scale"
        )
        raise ValueError(
            f"{name} has shape {tuple(latents.shape)}, expected {expected}: (prompts x results for each, {parts})"
        )
    if not latents.is_floating_point() or not bool(latents.isfinite().all()):
        raise ValueError(f"{name} must hold finite floating-point numbers, but has {latents.dtype} or NaN or infinity")


def start_latents(
    shape: tuple[int, ...],
    sigma: float,
    *,
    generator: Generators | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    latents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Noise of standard deviation `sigma` for denoising to start from, made of `latents` (deviation 1) if given."""
    if latents is None:
        latents = randn_tensor(shape, generator=generator, device=device, dtype=dtype)
    return latents.to(device=device, dtype=dtype) * sigma


def to_model_scale(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents as the autoencoder gives them, shifted and scaled to what the denoiser was trained on."""
    mean, scale = _mean_and_scale(vae, latents)
    return (latents - mean) * scale


def to_vae_scale(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """The way back from `to_model_scale`."""
    mean, scale = _mean_and_scale(vae, latents)
    return latents / scale + mean


def _mean_and_scale(vae: Any, latents: torch.Tensor) -> tuple[Any, Any]:
    """What the config says: a shift and a factor, or a mean and a deviation for each channel besides.

    Some autoencoders keep the latter with their weights.
    """
    config = vae.config
    mean, scale = config.get("shift_factor") or 0.0, config.get("scaling_factor") or 1.0
    names = ("latents_mean", "latents_std")
    kept = [config[name] if config.get(name) is not None else getattr(vae, name, None) for name in names]
    if all(each is not None for each in kept):
        axes = (1, -1, *[1] * (latents.ndim - 2))
        placed = {"device": latents.device, "dtype": latents.dtype}
        mean, deviation = (torch.as_tensor(each, **placed).view(axes) for each in kept)
        scale = scale / deviation
    return mean, scale


def encode_image(
    vae: Any,
    image: torch.Tensor,
    *,
    generator: Generators | None = None,
    upcast: bool = False,
    draw: bool = True,
) -> torch.Tensor:
    """Pictures to latents at the denoiser's scale, drawn from the distribution that the encoder gives.

    Args:
        vae: the autoencoder.
        image: shape (N, C, H, W), values from -1 to 1.
        generator: one, or a list with one for each picture; each picture of a list is encoded alone.
        upcast: compute in float32 from the start where the autoencoder is in float16.
        draw: False takes the distribution's mean, which needs no random numbers.

    Returns:
        Shape (N, channels, H / scale, W / scale), in the autoencoder's dtype.

    Raises:
        NumericalError: if float32 gives values that are not finite too.
    """

    def encoded(values: torch.Tensor) -> torch.Tensor:
        if isinstance(generator, list):
            pairs = zip(values.split(1), generator, strict=True)
            return torch.cat([_sample(vae.encode(one), each, draw) for one, each in pairs])
        return _sample(vae.encode(values), generator, draw)

    latents = _with_range(vae, encoded, image, "latents of the image", upcast, generator)
    return to_model_scale(vae, latents)


def decode_latents(
    vae: Any,
    latents: torch.Tensor,
    *,
    generator: Generators | None = None,
    upcast: bool = False,
    scaled: bool = False,
    **conditions: Any,
) -> torch.Tensor:
    """Latents at the denoiser's scale to pictures.

    Args:
        vae: the autoencoder.
        latents: shape (N, channels, h, w).
        generator: handed to the decoder, which some make use of.
        upcast: compute in float32 from the start where the autoencoder is in float16.
        scaled: `latents` are at the autoencoder's scale already, see `to_vae_scale`.
        conditions: what else the decoder takes, such as `image` and `mask`.

    Returns:
        Shape (N, C, h * scale, w * scale), values from -1 to 1 or a little beyond.

    Raises:
        NumericalError: if `latents` are not finite, or float32 gives values that are not finite too.
    """
    require_finite(latents, "latents", "run the denoiser in bfloat16 or float32, or lower the guidance scale")

    def decoded(values: torch.Tensor) -> torch.Tensor:
        given = {name: value.to(values.dtype) for name, value in conditions.items()}
        return vae.decode(values, return_dict=False, generator=generator, **given)[0]

    latents = latents if scaled else to_vae_scale(vae, latents)
    return _with_range(vae, decoded, latents, "picture", upcast, generator)


def _with_range(
    vae: Any,
    compute: Callable[[torch.Tensor], torch.Tensor],
    values: torch.Tensor,
    what: str,
    upcast: bool,
    generator: Generators | None,
) -> torch.Tensor:
    """`compute(values)` in the autoencoder's dtype; float16 that overflows, or is known to, gives way to float32."""
    with _locks.setdefault(vae, threading.RLock()):
        dtype = vae.dtype
        if not (upcast and dtype == torch.float16):
            states = [(each, each.get_state()) for each in _listed(generator)] if dtype == torch.float16 else []
            result = compute(values.to(dtype))
            if dtype != torch.float16 or bool(torch.isfinite(result).all()):
                require_finite(result, what, "load the autoencoder in float32, and check its weights and the input")
                return result
            # The second try has to draw the same numbers as the first.
            for each, state in states:
                each.set_state(state)
            logger.warning("the autoencoder overflows in float16, so it computes again in float32; bfloat16 avoids it")
        vae.to(dtype=torch.float32)
        try:
            result = compute(values.float())
        finally:
            vae.to(dtype=dtype)
    require_finite(result, what, "float32 does not help, so check the autoencoder's weights and the input")
    return result


def _listed(generator: Generators | None) -> list[torch.Generator]:
    return generator if isinstance(generator, list) else [generator] if generator is not None else []


def _sample(encoded: Any, generator: torch.Generator | None, draw: bool) -> torch.Tensor:
    """Latents out of what an encoder returns: a distribution to draw from, or latents as they are."""
    if hasattr(encoded, "latent_dist"):
        return encoded.latent_dist.sample(generator) if draw else encoded.latent_dist.mode()
    return encoded.latents


def spread(values: torch.Tensor, count: int, batch: int, name: str) -> torch.Tensor:
    """One entry for each of `batch` pictures, from one for all, one for each of `count` prompts, or one for each.

    Raises:
        ValueError: if there is another number of entries.
    """
    given = len(values)
    if given not in (1, count, batch):
        raise ValueError(f"{name} has {given} entries for {count} prompts: pass one for each, or a single one")
    return values.repeat_interleave(batch // given, dim=0)


def pack_latents(latents: torch.Tensor) -> torch.Tensor:
    """Latents (N, C, h, w) to tokens of 2 x 2 pixels, (N, h / 2 * w / 2, 4 C), row by row, as FLUX.1 takes them."""
    count, channels, height, width = latents.shape
    blocks = latents.reshape(count, channels, height // 2, 2, width // 2, 2)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, 4 * channels)


def unpack_latents(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The way back from `pack_latents`, to latents of `height` and `width`."""
    count, _, channels = tokens.shape
    blocks = tokens.reshape(count, height // 2, width // 2, channels // 4, 2, 2)
    return blocks.permute(0, 3, 1, 4, 2, 5).reshape(count, channels // 4, height, width)
