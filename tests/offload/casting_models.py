"""Small modules that the tests of casting share."""

import torch
from torch import nn

from diffusion_core import UNet2DConditionModel

TINY = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}


def tiny_unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(**TINY).eval()


def unet_inputs(dtype: torch.dtype = torch.float32, batch: int = 2) -> dict:
    generator = torch.Generator().manual_seed(1)
    return {
        "sample": torch.randn(batch, 4, 8, 8, generator=generator).to(dtype),
        "timestep": torch.tensor(7),
        "encoder_hidden_states": torch.randn(batch, 5, 16, generator=generator).to(dtype),
    }


def run(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs or unet_inputs(model.dtype))).sample


class Layers(nn.Module):
    """One layer of each kind that is cast, layers that are not, and two that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(6, 8, padding_idx=1)
        self.tied = nn.Linear(8, 6, bias=False)
        self.tied.weight = self.embedding.weight
        self.linear = nn.Linear(8, 8)
        self.conv1 = nn.Conv1d(8, 8, 3, padding=1, padding_mode="circular")
        self.back1 = nn.ConvTranspose1d(8, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.back2 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.conv3 = nn.Conv3d(8, 8, 1)
        self.back3 = nn.ConvTranspose3d(8, 8, 1)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.rand(8))
        self.register_buffer("offset", torch.rand(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(self.embedding(ids))) * self.scale + self.offset
        x = self.back1(self.conv1(x.transpose(1, 2)))
        x = self.back2(self.conv2(x[..., None].expand(-1, -1, -1, 4).contiguous()))
        x = self.back3(self.conv3(x[:, :, None])).mean(dim=(2, 3, 4))
        return self.tied(x)


IDS = torch.tensor([[0, 3, 5, 1], [2, 2, 4, 0]])
