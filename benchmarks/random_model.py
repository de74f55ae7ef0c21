"""A GGUF file of a Llama with random weights, which both engines run: as large as wanted, the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from workers.engines.llama_weights import Floats, LlamaConfig
from workers.engines.paged_kv import position_bytes
from workers.engines.tiny import VOCABULARY_SIZE, tiny_vocabulary_data

#: 5.9 million weights in the layers, and 0.3 in embedding and head.
SIX_MILLION = LlamaConfig(
    layers=8,
    width=256,
    heads=8,
    kv_heads=4,
    head_dim=32,
    ffn_width=704,
    vocabulary_size=VOCABULARY_SIZE,
    context_length=8192,
    rope_base=10000.0,
    norm_epsilon=1e-5,
)


def kv_bytes(tokens: int, config: LlamaConfig = SIX_MILLION) -> int:
    """Bytes of the numpy engine's KV for so many tokens."""
    return tokens * position_bytes(config)


def write_model(path: Path, config: LlamaConfig = SIX_MILLION, *, seed: int = 7) -> None:
    """Write the file: float32, of unit gain, with sharp attention, so that every token of a prompt moves the output."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    _add_vocabulary(writer)
    for name, tensor in _tensors(config, np.random.default_rng(seed)).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any) -> None:
    data = tiny_vocabulary_data()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(data.tokens))
    writer.add_token_types(list(data.token_types))
    writer.add_token_merges(list(data.merges))
    writer.add_eos_token_id(data.eos_ids[-1])
    writer.add_chat_template(data.chat_template)


def _tensors(config: LlamaConfig, rng: np.random.Generator) -> dict[str, Floats]:
    width, ffn = config.width, config.ffn_width
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> Floats:
        return rng.standard_normal((outputs, inputs), dtype=np.float32) * np.float32(gain * inputs**-0.5)

    ones = np.ones(width, np.float32)
    made: dict[str, Floats] = {
        "token_embd.weight": rng.standard_normal((config.vocabulary_size, width), dtype=np.float32),
        "output_norm.weight": ones,
        "output.weight": matrix(config.vocabulary_size, width, 2.5),
    }
    for layer in range(config.layers):
        parts = {
            "attn_norm": ones,
            "attn_q": matrix(queries, width, 2.0),
            "attn_k": matrix(keys, width, 2.0),
            "attn_v": matrix(keys, width, 2.0),
            "attn_output": matrix(width, queries),
            "ffn_norm": ones,
            "ffn_gate": matrix(ffn, width, 2.0),
            "ffn_up": matrix(ffn, width, 2.0),
            "ffn_down": matrix(width, ffn),
        }
        made |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    return made
