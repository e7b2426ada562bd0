"""Randomness: one generator or many, and the same numbers for every device."""

import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor as reference

from diffusion_core.randomness import check_generator, randn_tensor, seeded_generators


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_the_reference(dtype: torch.dtype) -> None:
    shape = (3, 4, 5, 7)
    assert torch.equal(
        randn_tensor(shape, generator=seeded(1), dtype=dtype), reference(shape, generator=seeded(1), dtype=dtype)
    )
    ours = randn_tensor(shape, generator=seeded_generators(5, 3), dtype=dtype)
    assert torch.equal(ours, reference(shape, generator=seeded_generators(5, 3), dtype=dtype))


def test_without_a_generator_the_global_one_draws() -> None:
    torch.manual_seed(3)
    first = randn_tensor((2, 3))
    torch.manual_seed(3)
    assert torch.equal(first, torch.randn(2, 3))


def test_an_image_of_a_batch_can_be_drawn_alone() -> None:
    together = randn_tensor((4, 2, 3), generator=seeded_generators(7, 4))
    for index in range(4):
        assert torch.equal(together[index : index + 1], randn_tensor((1, 2, 3), generator=seeded(7 + index)))


def test_a_cpu_generator_draws_on_the_cpu_whatever_the_device() -> None:
    generator = seeded(2)
    drawn = randn_tensor((2, 3), generator=generator, device="meta")
    assert drawn.device.type == "meta"
    advanced = seeded(2)
    torch.randn((2, 3), generator=advanced)
    assert torch.equal(generator.get_state(), advanced.get_state())


class AcceleratorGenerator(torch.Generator):
    """A generator that says that it lives on an accelerator, where there is none."""

    device = torch.device("cuda", 0)


def test_a_generator_elsewhere_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"cuda:0 cannot draw for cpu.*Generator\('cpu'\)"):
        randn_tensor((1, 2), generator=AcceleratorGenerator(), device="cpu")
    with pytest.raises(ValueError, match="cannot draw for cpu"):
        randn_tensor((1, 2), generator=[AcceleratorGenerator()], device="cpu")


@pytest.mark.parametrize("length", [1, 3])
def test_a_list_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"list of {length}, but 2 samples"):
        randn_tensor((2, 3), generator=seeded_generators(0, length))


def test_what_is_no_generator_is_refused() -> None:
    for wrong in (7, [7], "seed"):
        with pytest.raises(TypeError, match=r"torch\.Generator"):
            check_generator(wrong, 1)  # type: ignore[arg-type]
