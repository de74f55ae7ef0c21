"""A GGUF file of a Llama as the folder that vLLM and transformers load: bfloat16 in one safetensors file.

The numbers are those of the GGUF file, dequantised and rounded to bfloat16. Formats: safetensors is a JSON header with
its length before it (8 bytes, little-endian), then the tensors; the rotary embedding's pairs are (0, 1), (2, 3), ... in
a GGUF file, and (i, i + head_dim / 2) here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tasks.vocabulary import CONTROL, VocabularyData
from workers.engines.gguf_file import StoredTensor, open_gguf
from workers.engines.gguf_model import read_vocabulary
from workers.engines.llama_weights import Floats

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_checkpoint(source: Path, folder: Path) -> None:
    """Write the folder's files. Raises ConfigurationError for a file that is no GGUF or has another tokenizer than the
    known ones, ValueError for another architecture."""
    vocabulary, metadata = read_vocabulary(source)
    if metadata.get("general.architecture") != "llama":
        raise ValueError(f"{source.name} is no Llama")
    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    tensors = {_name(name): _bfloat16(tensor, heads) for name, tensor in open_gguf(source).tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    _write_safetensors(folder / "model.safetensors", tensors)
    write_tokenizer(folder, vocabulary.data)
    tied = "lm_head.weight" not in tensors
    config = _config(metadata, vocabulary.data, tied)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _name(name: str) -> str:
    """A tensor's name in the checkpoint."""
    part, _, suffix = name.removeprefix("blk.").rpartition(".")
    if not name.startswith("blk."):
        return f"{_TENSORS[part]}.{suffix}"
    number, _, kind = part.partition(".")
    return f"model.layers.{number}.{_LAYER_TENSORS[kind]}.{suffix}"


def _bfloat16(tensor: StoredTensor, heads: Mapping[str, int]) -> npt.NDArray[np.uint16]:
    """Its numbers as the upper halves of float32, rounded to even."""
    rows = tensor.data.reshape(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)
    plain = tensor.kind is GGMLQuantizationType.F32
    values: Floats = rows.view(np.float32) if plain else np.asarray(dequantize(rows, tensor.kind), np.float32)
    count = heads.get(tensor.name.split(".")[-2])
    if count:
        outputs, inputs = values.shape
        values = np.array(values.reshape(count, outputs // count // 2, 2, inputs).transpose(0, 2, 1, 3))
    bits = values.view(np.uint32).reshape(tensor.shape)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def _write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.uint16]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for values in tensors.values():
            file.write(values.tobytes())


def write_tokenizer(folder: Path, data: VocabularyData) -> None:
    """The two files of a tokenizer."""
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in data.merges)]
    bpe = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(data.tokens)}, merges=merges))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    bpe.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(data.tokens, data.token_types, strict=True) if kind == CONTROL]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    bpe.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": data.chat_template,
        "eos_token": data.tokens[data.eos_ids[-1]],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _config(metadata: Mapping[str, Any], data: VocabularyData, tied: bool) -> dict[str, Any]:
    heads, width = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get("llama.attention.key_length", width // heads),
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": len(data.tokens),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": data.bos_id,
        "eos_token_id": data.eos_ids[-1],
    }
