"""Case 166: families whose prompts have a pooled embedding say that it is missing, in one message, before any call."""

from typing import Any

import pytest
import torch

from . import families

NAMES = ("stable-diffusion-xl", "stable-diffusion-3", "flux")
POOLED = [family for family in families.FAMILIES if family.name in NAMES]


@pytest.mark.parametrize("family", POOLED, ids=str)
@pytest.mark.parametrize("lacking", ["pooled_prompt_embeds", "prompt_embeds"])
def test_an_embedding_without_its_other_half_is_refused(family: Any, lacking: str) -> None:
    made = families.pipe(family)
    calls: list[str] = []
    handles = [part.register_forward_pre_hook(lambda *_: calls.append("called"))
               for part in made.components.values() if isinstance(part, torch.nn.Module)]  # fmt: skip
    try:
        given = family.embed(made, families.PROMPTS[:1], families.NEGATIVES[:1])
        calls.clear()
        arguments = family.call("text", prompt=None, **{key: value for key, value in given.items() if key != lacking})
        arguments.pop("negative_prompt", None)
        with pytest.raises(ValueError, match=lacking):
            made(**arguments)
    finally:
        for handle in handles:
            handle.remove()
    assert len(POOLED) == 3 and calls == []
