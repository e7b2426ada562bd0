"""Small modules with what makes placing hard: ties, buffers, loose tensors, branches, another order than defined."""

from typing import Any

import torch
from torch import nn

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)])
        self.register_buffer("shift", torch.randn(WIDTH))
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        for layer in self.inner:
            x = layer(x)
        return torch.tanh(x * self.gain + self.shift)


class Toy(nn.Module):
    """`first` is defined last; `head` shares its weight with `table`; `extra` runs only if asked."""

    _entry_points = ("forward", "encode")

    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.table = nn.Embedding(8, WIDTH)
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.table.weight
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.loose = nn.Parameter(torch.randn(WIDTH))
        self.scales = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
        self.register_buffer("hidden", torch.randn(WIDTH), persistent=False)
        self.first = nn.Linear(WIDTH, WIDTH)

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self.first(self.table(ids)) * self.scales[0]

    def forward(self, ids: torch.Tensor, extra: bool = False, fail: bool = False) -> dict[str, torch.Tensor]:
        x = self.encode(ids)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if extra and index == 1:
                x = self.extra(x)
            if fail and index == 2:
                raise KeyboardInterrupt
        return {"x": self.head(x + self.loose + self.hidden + self.scales[1])}


def toy(seed: int = 0, blocks: int = 5) -> Toy:
    torch.manual_seed(seed)
    return Toy(blocks).eval()


IDS = torch.tensor([[1, 2, 3]])


def picture(module: nn.Module) -> dict[str, tuple[int, int, torch.Tensor]]:
    """What must come back exactly: of each tensor, the object, its address and its values."""
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return {name: (id(tensor), tensor.data_ptr(), tensor.detach().clone()) for name, tensor in tensors.items()}


def same(before: dict[str, Any], after: dict[str, Any], addresses: bool = True) -> bool:
    return before.keys() == after.keys() and all(
        old[0] == new[0] and (not addresses or old[1] == new[1]) and torch.equal(old[2], new[2])
        for old, new in zip(before.values(), after.values(), strict=True)
    )


def traces(module: nn.Module) -> dict[str, Any]:
    """What a placement could leave behind on modules."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_state_dict_hooks")
    return {
        name: (sorted(part.__dict__), [len(getattr(part, hook)) for hook in hooks])
        for name, part in module.named_modules()
    }
