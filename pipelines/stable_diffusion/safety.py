"""The safety checker of Stable Diffusion: CLIP's view of a picture compared with concepts that are not to be shown."""

from typing import Any

import torch
from torch import nn
from transformers import CLIPConfig, CLIPVisionModel, PreTrainedModel

# Scores were rounded to three digits when the thresholds were chosen: what rounds to zero does not count.
_LEAST_SCORE = 5e-4
# Pictures close to a special concept are judged a little more strictly.
_STRICTER = 0.01


class StableDiffusionSafetyChecker(PreTrainedModel):
    """Takes pictures out whose CLIP embedding lies too close to one of its concepts (arXiv 2210.04610, section 2).

    The concepts and their thresholds are part of the checkpoint. The names of its tensors are those of the Hub.

    Args:
        config: a `CLIPConfig`; its vision part and `projection_dim` count.
    """

    config_class = CLIPConfig
    main_input_name = "clip_input"
    _no_split_modules = ["CLIPEncoderLayer"]  # noqa: RUF012

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__(config)
        size: Any = config.projection_dim
        vision: Any = config.vision_config
        self.vision_model = CLIPVisionModel(vision)
        self.visual_projection = nn.Linear(vision.hidden_size, size, bias=False)
        self.concept_embeds = nn.Parameter(torch.ones(17, size), requires_grad=False)
        self.special_care_embeds = nn.Parameter(torch.ones(3, size), requires_grad=False)
        self.concept_embeds_weights = nn.Parameter(torch.ones(17), requires_grad=False)
        self.special_care_embeds_weights = nn.Parameter(torch.ones(3), requires_grad=False)
        self.post_init()

    @torch.no_grad()
    def forward(self, clip_input: torch.Tensor, images: Any) -> tuple[Any, list[bool]]:
        """Judge pictures and black out those that are refused.

        Args:
            clip_input: the pictures as CLIP's image processor gives them, shape (N, 3, H, W).
            images: the same N pictures as a tensor or array; refused ones become zero in a copy.

        Returns:
            The pictures, and for each whether it was refused.
        """
        flagged = self.judge(clip_input)
        if any(flagged):
            images = images.clone() if isinstance(images, torch.Tensor) else images.copy()
            for index in range(len(flagged)):
                if flagged[index]:
                    images[index] = 0.0
        return images, flagged

    def judge(self, clip_input: torch.Tensor) -> list[bool]:
        """For each picture, whether a concept's cosine similarity exceeds its threshold."""
        embeds = self.visual_projection(self.vision_model(clip_input).pooler_output)
        special = _cosine(embeds, self.special_care_embeds) - self.special_care_embeds_weights
        strict = (special > _LEAST_SCORE).any(dim=1, keepdim=True)
        scores = _cosine(embeds, self.concept_embeds) - self.concept_embeds_weights + strict * _STRICTER
        return (scores > _LEAST_SCORE).any(dim=1).tolist()


def _cosine(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The cosine similarity of every row with every row, in float32."""
    return nn.functional.normalize(first.float()) @ nn.functional.normalize(second.float()).T
