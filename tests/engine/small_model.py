"""A small Llama with random weights as a GGUF file, for engines that read nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from tests.engine.gguf_writing import Floats, write_gguf
from workers.engines.tiny import tiny_vocabulary

WIDTH, FFN, LAYERS, HEADS, KV_HEADS, CONTEXT = 128, 256, 3, 4, 2, 2048
HEAD_DIM = WIDTH // HEADS
VOCABULARY = tiny_vocabulary()
METADATA: dict[str, Any] = {
    "block_count": LAYERS,
    "context_length": CONTEXT,
    "embedding_length": WIDTH,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": HEAD_DIM,
}
#: Of KV, in float16.
BYTES_PER_TOKEN = LAYERS * KV_HEADS * 2 * HEAD_DIM * 2


def write_small_model(path: Path, *, kind: GGMLQuantizationType = GGMLQuantizationType.Q4_0, **metadata: Any) -> Path:
    """The model, its matrices stored as `kind`, single keys replaced."""
    write_gguf(path, metadata=METADATA | metadata, tensors=small_tensors(), vocabulary=VOCABULARY, kind=kind)
    return path


def small_tensors() -> dict[str, Floats]:
    """Maps of unit gain, with sharp attention, so that every token of the context moves the output."""
    rng = np.random.default_rng(11)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> Floats:
        return rng.standard_normal((outputs, inputs), dtype=np.float32) * np.float32(gain / np.sqrt(inputs))

    ones = np.ones(WIDTH, np.float32)
    made = {"token_embd.weight": matrix(VOCABULARY.size, WIDTH, gain=WIDTH**0.5), "output_norm.weight": ones}
    made["output.weight"] = matrix(VOCABULARY.size, WIDTH, gain=2.5)
    for layer in range(LAYERS):
        parts = {
            "attn_norm": ones,
            "attn_q": matrix(WIDTH, WIDTH, gain=2.0),
            "attn_k": matrix(KV_HEADS * HEAD_DIM, WIDTH, gain=2.0),
            "attn_v": matrix(KV_HEADS * HEAD_DIM, WIDTH),
            "attn_output": matrix(WIDTH, WIDTH),
            "ffn_norm": ones,
            "ffn_gate": matrix(FFN, WIDTH, gain=2.0),
            "ffn_up": matrix(FFN, WIDTH, gain=2.0),
            "ffn_down": matrix(WIDTH, FFN),
        }
        made |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    return made
