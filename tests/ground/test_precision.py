"""The switch of float32 products, and that nothing else touches it."""

from collections.abc import Iterator

import pytest
import torch

import diffusion_core
from tests.pipelines import tiny
from tests.pipelines.sd import pipe, seeded


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.mark.parametrize(
    ("precision", "products", "convolutions"),
    [("highest", "highest", False), ("high", "high", True), ("medium", "medium", True), ("default", "highest", True)],
)
def test_a_precision_is_for_products_and_convolutions(precision: str, products: str, convolutions: bool) -> None:
    assert diffusion_core.set_matmul_precision(precision) == "default"
    assert torch.get_float32_matmul_precision() == products
    assert torch.backends.cudnn.allow_tf32 == convolutions
    assert torch.backends.cuda.matmul.allow_tf32 == (products != "highest")
    assert diffusion_core.set_matmul_precision("default") == precision
    assert torch.get_float32_matmul_precision() == "highest"


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"precision='tf32' is not known; choose of highest, high, medium, default"):
        diffusion_core.set_matmul_precision("tf32")
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("allowed", [True, False])
def test_a_run_leaves_torchs_switch_alone(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    made = pipe(unet=tiny.unet(diffusion_core), vae=tiny.vae(diffusion_core))
    made("a red cat", num_inference_steps=1, generator=seeded(), output_type="pt")
    assert torch.backends.cuda.matmul.allow_tf32 is allowed
