"""What textual inversion does to a text encoder, done under each memory mode; and the refusals of what is not here."""

import pytest
import torch

from diffusion_core.errors import UnsupportedError
from diffusion_core.offload.engine import placement_of
from diffusion_core.offload.simulator import simulator, unavailable
from tests.offload.drawing import CAPACITY, MODES, draw, load, undo

pytestmark = pytest.mark.simulator


@pytest.fixture
def sim():
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    with simulator(devices=2, capacity=CAPACITY) as running:
        yield running


def learn_token(pipe) -> None:
    """A new word with a vector of its own (Gal et al. 2022, arXiv 2208.01618), as users add it."""
    pipe.tokenizer.add_tokens("<thing>")
    pipe.text_encoder.resize_token_embeddings(len(pipe.tokenizer))
    vectors = pipe.text_encoder.get_input_embeddings().weight
    with torch.no_grad():
        vectors[-1] = torch.linspace(-1, 1, vectors.shape[1], device=vectors.device)


def with_token(pipe) -> torch.Tensor:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    return pipe("a <thing>", latents=latents, num_inference_steps=1, output_type="pt").images.cpu()


@pytest.mark.parametrize("mode", ["sequential", "model", "leaf, streams", "two blocks, streams"])
def test_a_learned_token_under_a_mode(sim, mode):
    """Cases 8 and 71: the placement stays, and the new vectors take part in it."""
    plain = load()
    learn_token(plain)
    expected = with_token(plain)
    pipe = load()
    MODES[mode](pipe)
    draw(pipe)
    learn_token(pipe)
    assert placement_of(pipe.text_encoder) is not None
    for _ in range(2):
        assert torch.equal(with_token(pipe), expected)
    undo(pipe)
    assert torch.equal(with_token(pipe), expected)


@pytest.mark.parametrize("mode", ["sequential", "leaf, streams"])
def test_what_is_not_here_is_refused_and_leaves_the_placement(sim, mode):
    """Cases 8, 71 and 79, called as the reference's users do: in either order a refusal, and nothing has changed."""
    pipe = load()
    with pytest.raises(UnsupportedError, match="device_map"):
        pipe.unet.enable_parallelism(config=None)
    MODES[mode](pipe)
    before = placement_of(pipe.unet)
    picture = draw(pipe)
    with pytest.raises(UnsupportedError, match="device_map"):
        pipe.unet.enable_parallelism(config=None)
    with pytest.raises(UnsupportedError):
        pipe.load_textual_inversion("sd-concepts-library/cat-toy")
    assert placement_of(pipe.unet) is before
    assert torch.equal(draw(pipe), picture)
