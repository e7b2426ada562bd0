"""GGUF files for tests, written by the gguf package, and the layout of FLUX's authors."""

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants


def authors_layout(state):
    """A state dict of ours under the names, and in the arrangement, of FLUX's authors."""
    one = {
        "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
        "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "transformer_blocks.0.norm1.linear": "double_blocks.0.img_mod.lin",
        "transformer_blocks.0.norm1_context.linear": "double_blocks.0.txt_mod.lin",
        "transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn.proj",
        "transformer_blocks.0.attn.to_add_out": "double_blocks.0.txt_attn.proj",
        "transformer_blocks.0.ff.net.0.proj": "double_blocks.0.img_mlp.0",
        "transformer_blocks.0.ff.net.2": "double_blocks.0.img_mlp.2",
        "transformer_blocks.0.ff_context.net.0.proj": "double_blocks.0.txt_mlp.0",
        "transformer_blocks.0.ff_context.net.2": "double_blocks.0.txt_mlp.2",
        "single_transformer_blocks.0.norm.linear": "single_blocks.0.modulation.lin",
        "single_transformer_blocks.0.proj_out": "single_blocks.0.linear2",
        "proj_out": "final_layer.linear",
    }
    several = {
        "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.to_{x}" for x in "qkv"],
        "double_blocks.0.txt_attn.qkv": [f"transformer_blocks.0.attn.add_{x}_proj" for x in "qkv"],
        "single_blocks.0.linear1": [
            *(f"single_transformer_blocks.0.attn.to_{x}" for x in "qkv"),
            "single_transformer_blocks.0.proj_mlp",
        ],
    }
    result = {}
    for leaf in ("weight", "bias"):
        result |= {f"{theirs}.{leaf}": state[f"{ours}.{leaf}"] for ours, theirs in one.items()}
        result |= {
            f"{theirs}.{leaf}": torch.cat([state[f"{x}.{leaf}"] for x in ours]) for theirs, ours in several.items()
        }
        scale, shift = state[f"norm_out.linear.{leaf}"].chunk(2)
        result[f"final_layer.adaLN_modulation.1.{leaf}"] = torch.cat([shift, scale])
    norms = {"double_blocks.0.img_attn.norm": "transformer_blocks.0.attn.norm_",
             "double_blocks.0.txt_attn.norm": "transformer_blocks.0.attn.norm_added_",
             "single_blocks.0.norm": "single_transformer_blocks.0.attn.norm_"}  # fmt: skip
    for theirs, ours in norms.items():
        for word in ("query", "key"):
            result[f"{theirs}.{word}_norm.scale"] = state[f"{ours}{word[0]}.weight"]
    return result


def write(path, tensors, form="Q8_0", **keys):
    """A GGUF file with matrices in a block format where their rows allow it, and float32 otherwise."""
    writer = GGUFWriter(path, "flux")
    for name, value in keys.items():
        writer.add_uint32(name, value)
    kind = GGMLQuantizationType[form]
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
