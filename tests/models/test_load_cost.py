"""What loading does beside placing weights: nothing that waits, and no byte is read twice."""

import collections
import gc
from pathlib import Path

import pytest
import torch

from diffusion_core import AutoencoderTiny
from diffusion_core.offload.checkpoint import TensorFile

CONFIG = {
    "encoder_block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "num_encoder_blocks": (1, 1),
    "num_decoder_blocks": (1, 1),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    AutoencoderTiny(**CONFIG).save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    return tmp_path


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, counts: collections.Counter[str]) -> None:
    original = getattr(owner, name)

    def counting(*args: object, **kwargs: object) -> object:
        counts[name] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)


def test_a_copied_tensor_is_read_in_one_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 34: page by page, the copy of a mapped file took 20 times as long."""
    counts: collections.Counter[str] = collections.Counter()
    counted(monkeypatch, TensorFile, "prefetch", counts)
    counted(monkeypatch, TensorFile, "read", counts)
    model = AutoencoderTiny.from_pretrained(folder, dtype=torch.bfloat16)
    tensors = len(model.state_dict())
    assert counts["prefetch"] + counts["read"] == tensors
    counts.clear()
    AutoencoderTiny.from_pretrained(folder, disable_mmap=True)
    assert counts["read"] == tensors


def test_no_cache_is_emptied_and_nothing_waits_between_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 37: a cache that was cleared after each shard made loading 4 times slower."""
    counts: collections.Counter[str] = collections.Counter()
    for name in ("empty_cache", "synchronize"):
        counted(monkeypatch, torch.cuda, name, counts)
        counted(monkeypatch, torch.accelerator, name, counts)
    counted(monkeypatch, gc, "collect", counts)
    AutoencoderTiny.from_pretrained(folder, dtype=torch.bfloat16)
    assert not counts
