"""Pictures in and out: equal to the reference where it is right, and clear errors for the rest."""

import random
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageFilter
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor as Reference
from diffusers.utils import make_image_grid as reference_grid
from diffusers.utils import pt_to_pil as reference_pt_to_pil

from diffusion_core.errors import NumericalError
from diffusion_core.images import (
    VaeImageProcessor,
    load_image,
    make_image_grid,
    numpy_to_pil,
    numpy_to_pt,
    pil_to_numpy,
    pt_to_numpy,
    pt_to_pil,
)


def picture(width: int = 29, height: int = 37, mode: str = "RGB", seed: int = 0) -> PIL.Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(values).convert(mode)


def array(*shape: int) -> Any:
    return np.random.default_rng(0).random(shape)


def same(first: PIL.Image.Image, second: PIL.Image.Image) -> bool:
    return first.size == second.size and first.mode == second.mode and bool(np.all(np.asarray(first) == second))


INPUTS: dict[str, Callable[[], Any]] = {
    "pil": picture,
    "gray pil": partial(picture, mode="L"),
    "rgba pil": partial(picture, mode="RGBA"),
    "pil list": lambda: [picture(), picture(seed=1)],
    "pil list of sizes": lambda: [picture(), picture(50, 61)],
    "array": lambda: array(37, 29, 3),
    "array batch": lambda: array(2, 37, 29, 3),
    "array list": lambda: [array(37, 29, 3)] * 2,
    "array batch list": lambda: [array(1, 37, 29, 3)] * 2,
    "tensor": lambda: torch.rand(3, 37, 29, generator=torch.Generator().manual_seed(0)),
    "tensor batch": lambda: torch.rand(2, 3, 37, 29, generator=torch.Generator().manual_seed(0)),
    "tensor list": lambda: [torch.full((3, 37, 29), 0.3)] * 2,
    "tensor batch list": lambda: [torch.full((1, 3, 37, 29), 0.3)] * 2,
    "signed tensor": lambda: torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16),
    "latents": lambda: torch.randn(1, 4, 5, 6, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("settings", [{}, {"do_normalize": False}, {"vae_scale_factor": 2, "resample": "bicubic"}])
@pytest.mark.parametrize("kind", INPUTS)
def test_preprocess_equals_the_reference(kind: str, settings: dict[str, Any]) -> None:
    for size in ({}, {"height": 48, "width": 16}):
        ours = VaeImageProcessor(**settings).preprocess(INPUTS[kind](), **size)
        theirs = Reference(**settings).preprocess(INPUTS[kind](), **size)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


MASKS: dict[str, Callable[[], Any]] = {
    "pil": picture,
    "gray": partial(picture, mode="L"),
    "array": lambda: array(37, 29),
    "array batch": lambda: array(2, 37, 29),
    "array with channel": lambda: array(37, 29, 1),
    "array batch with channel": lambda: array(2, 37, 29, 1),
    "tensor": lambda: torch.from_numpy(array(37, 29)),
    "tensor batch": lambda: torch.from_numpy(array(2, 37, 29)),
    "tensor with channel": lambda: torch.from_numpy(array(1, 37, 29)),
    "tensor batch with channel": lambda: torch.from_numpy(array(2, 1, 37, 29)),
    "tensor list": lambda: [torch.from_numpy(array(37, 29))] * 2,
    "tensor list with channel": lambda: [torch.from_numpy(array(1, 37, 29))] * 2,
    "array list": lambda: [array(37, 29)] * 2,
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_equal_the_reference(kind: str) -> None:
    settings: dict[str, Any] = {"do_normalize": False, "do_binarize": True, "do_convert_grayscale": True}
    ours = VaeImageProcessor(**settings).preprocess(MASKS[kind]())
    assert torch.equal(ours, Reference(**settings).preprocess(MASKS[kind]()))
    assert set(ours.unique().tolist()) == {0.0, 1.0}


def test_resize_modes_and_regions_equal_the_reference() -> None:
    chance = random.Random(0)
    ours, theirs = VaeImageProcessor(), Reference()
    for seed in range(40):
        image = picture(chance.randint(8, 90), chance.randint(8, 90), seed=seed)
        width, height = chance.randint(1, 12) * 8, chance.randint(1, 12) * 8
        for mode in ("default", "fill", "crop"):
            assert same(ours.resize(image, height, width, mode), theirs.resize(image, height, width, mode))
        mask = PIL.Image.new("L", image.size)
        x, y = chance.randint(0, image.width - 1), chance.randint(0, image.height - 1)
        mask.paste(255, (x, y, x + chance.randint(1, 30), y + chance.randint(1, 30)))
        pad = chance.choice([0, 3, 32])
        region = ours.get_crop_region(mask, width, height, pad)
        assert region == tuple(theirs.get_crop_region(mask, width, height, pad))
        painted = picture(width, height, seed=seed + 100)
        assert same(
            ours.apply_overlay(mask, image, painted, region), theirs.apply_overlay(mask, image, painted, region)
        )
        soft = mask.filter(PIL.ImageFilter.GaussianBlur(2))
        assert same(ours.blur(mask, 2), soft)
        repainted = picture(*image.size, seed=seed + 200)
        assert same(ours.apply_overlay(soft, image, repainted), theirs.apply_overlay(soft, image, repainted))


def test_an_overlay_never_darkens_what_lies_outside_the_crop() -> None:
    image, soft = picture(), PIL.Image.new("L", (29, 37), 128)
    result = VaeImageProcessor().apply_overlay(soft, image, picture(16, 16, seed=1), (4, 4, 12, 12))
    assert np.abs(np.asarray(result)[20:].astype(int) - np.asarray(image)[20:]).max() <= 2


def test_postprocess_equals_the_reference() -> None:
    ours, theirs = VaeImageProcessor(), Reference()
    image = torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.postprocess(image, "pt"), theirs.postprocess(image, "pt"))
    assert np.array_equal(ours.postprocess(image, "np"), theirs.postprocess(image, "np"))
    assert ours.postprocess(image, "latent") is image
    for channels in (image, image[:, :1]):
        for one, other in zip(ours.postprocess(channels), theirs.postprocess(channels), strict=True):
            assert same(one, other)
    flags = [True, False]
    mixed = theirs.postprocess(image.clamp(0, 1), "pt", do_denormalize=flags)
    assert torch.equal(ours.postprocess(image.clamp(0, 1), "pt", do_denormalize=flags), mixed)
    assert same(pt_to_pil(image)[0], reference_pt_to_pil(image)[0])


def test_round_trips() -> None:
    image = picture()
    assert same(numpy_to_pil(pil_to_numpy(image))[0], image)
    values = pil_to_numpy([image, image])
    assert np.array_equal(pt_to_numpy(numpy_to_pt(values)), values)
    processor = VaeImageProcessor(vae_scale_factor=1)
    assert same(processor.postprocess(processor.preprocess(image))[0], image)


@pytest.mark.parametrize("output_type", ["pil", "np", "pt"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_an_error_with_the_remedy(output_type: str, value: float) -> None:
    image = torch.zeros(1, 3, 4, 4)
    image[0, 0, 0, 0] = value
    with pytest.raises(NumericalError, match=r"1 of 48 values .* float32 or bfloat16"):
        VaeImageProcessor().postprocess(image, output_type)


def test_bytes_are_taken_as_bytes() -> None:
    processor = VaeImageProcessor()
    values = np.asarray(picture(16, 16))
    expected = processor.preprocess(picture(16, 16))
    assert torch.equal(processor.preprocess(values), expected)
    assert torch.equal(processor.preprocess(torch.from_numpy(values.copy()).permute(2, 0, 1)), expected)
    with pytest.raises(ValueError, match="values up to 2"):
        processor.preprocess(values.astype(np.float32))


@pytest.mark.parametrize("mode", ["P", "RGBA", "L", "1", "CMYK"])
def test_every_mode_becomes_rgb_on_request(mode: str) -> None:
    result = VaeImageProcessor(do_convert_rgb=True).preprocess(picture(16, 24, mode=mode))
    assert result.shape == (1, 3, 24, 16)


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        ([], ValueError, "empty list"),
        ("picture.png", TypeError, "not \\['str'\\]"),
        (None, TypeError, "NoneType"),
        ([picture(), torch.zeros(3, 8, 8)], TypeError, "all of one kind"),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 9, 8)], ValueError, "different shapes"),
        ([picture(), picture(mode="L")], ValueError, "different modes"),
        (torch.zeros(1, 1, 3, 8, 8), ValueError, "5 axes"),
    ],
)
def test_wrong_pictures_are_refused(image: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        VaeImageProcessor().preprocess(image)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        VaeImageProcessor(do_convert_rgb=True, do_convert_grayscale=True)
    with pytest.raises(ValueError, match="resample='area'"):
        VaeImageProcessor(resample="area")
    processor = VaeImageProcessor()
    with pytest.raises(ValueError, match="resize_mode='stretch'"):
        processor.preprocess(picture(), resize_mode="stretch")
    with pytest.raises(ValueError, match="output_type='jpeg'"):
        processor.postprocess(torch.zeros(1, 3, 4, 4), "jpeg")
    with pytest.raises(ValueError, match="1 entries for 2 images"):
        processor.postprocess(torch.zeros(2, 3, 4, 4), "pt", do_denormalize=[True])
    with pytest.raises(ValueError, match="black everywhere"):
        processor.get_crop_region(PIL.Image.new("L", (8, 8)), 8, 8)


def test_default_sizes_are_multiples_of_the_factor() -> None:
    processor = VaeImageProcessor(vae_scale_factor=16)
    for image in (picture(33, 47), array(47, 33, 3), torch.zeros(3, 47, 33)):
        assert processor.get_default_height_width(image) == (32, 32)
        assert processor.get_default_height_width(image, 100, 50) == (96, 48)


def test_grids() -> None:
    images = [picture(8, 6, seed=seed) for seed in range(6)]
    assert same(make_image_grid(images, 2, 3), reference_grid(images, 2, 3))
    assert same(make_image_grid(images, 3, 2, resize=4), reference_grid(images, 3, 2, resize=4))
    with pytest.raises(ValueError, match="needs 4 images"):
        make_image_grid(images, 2, 2)
    with pytest.raises(ValueError, match="different sizes"):
        make_image_grid([picture(8, 8), picture(9, 8)], 1, 2)


def test_load_image_from_a_path(tmp_path: Path) -> None:
    image = picture()
    image.save(tmp_path / "picture.png")
    assert same(load_image(tmp_path / "picture.png"), image)
    assert same(load_image(str(tmp_path / "picture.png")), image)
    assert load_image(picture(mode="L")).mode == "RGB"
    assert load_image(image, convert_method=lambda one: one.convert("L")).mode == "L"
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turned a quarter
    image.save(tmp_path / "turned.png", exif=exif)
    assert load_image(tmp_path / "turned.png").size == (37, 29)
    with pytest.raises(FileNotFoundError):
        load_image(tmp_path / "absent.png")
    (tmp_path / "page.png").write_text("<html>")
    with pytest.raises(ValueError, match=r"page\.png.* not a picture"):
        load_image(tmp_path / "page.png")
    with pytest.raises(TypeError, match="not int"):
        load_image(3)  # type: ignore[arg-type]


def test_load_image_from_an_address() -> None:
    content = BytesIO()
    picture().save(content, format="PNG")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/picture.png" else 404)
            self.end_headers()
            self.wfile.write(content.getvalue())

        def log_message(self, *_: Any) -> None:
            """Keep the test's output clean."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        assert same(load_image(f"{address}/picture.png"), picture())
        with pytest.raises(ValueError, match=r"could not be fetched.*404"):
            load_image(f"{address}/absent.png")
    finally:
        server.shutdown()
        server.server_close()
