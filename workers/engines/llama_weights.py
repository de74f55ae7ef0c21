"""The weights of a Llama, in the layout the numpy engine multiplies with.

Files store linear maps as (outputs, inputs) and pair neighbouring dimensions in the rotary embedding. Here a map is
cut into panels (P, inputs, outputs / P), see `exact_linear`; maps that read the same input are one; constant factors
(norm weights, the attention scale) are multiplied into the map that follows; and the rotary pairs are
(i, i + head_dim / 2), so that rotation works on two contiguous halves.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Hyperparameters. `width` = residual dimensions; `rope_base` and `norm_epsilon` as in the model's file."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    vocabulary_size: int
    context_length: int
    rope_base: float
    norm_epsilon: float

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def describe(self) -> dict[str, int | float]:
        """JSON-safe, for fingerprints."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Maps in panels: `qkv` from width to query_width + 2 * kv_width, `output` from query_width to width, `gate_up`
    from width to 2 * ffn_width, `down` from ffn_width to width."""

    qkv: Floats
    output: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """`head`: the map from width to V logits, in panels; `embedding` (V, width), or None when the head's columns are
    the embeddings; `final_norm` (width,); `digest` names where the weights come from (SHA-256 of a file, or a seed)."""

    config: LlamaConfig
    layers: tuple[LayerWeights, ...]
    final_norm: Floats
    head: Floats
    embedding: Floats | None
    digest: str


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One layer as model files store it: linear maps are (outputs, inputs)."""

    attention_norm: Floats
    query: Floats
    key: Floats
    value: Floats
    output: Floats
    ffn_norm: Floats
    gate: Floats
    up: Floats
    down: Floats


def lay_out(config: LlamaConfig, stored: StoredLayer) -> LayerWeights:
    """One stored layer in the engine's layout; the stored arrays are left as they are."""
    scale = np.float32(config.head_dim**-0.5)
    queries = _halves(stored.query, config.heads) * (stored.attention_norm * scale)
    keys = _halves(stored.key, config.kv_heads) * stored.attention_norm
    qkv = np.concatenate((queries, keys, stored.value * stored.attention_norm))
    gate_up = np.concatenate((stored.gate, stored.up)) * stored.ffn_norm
    return LayerWeights(in_panels(qkv), in_panels(stored.output), in_panels(gate_up), in_panels(stored.down))


def in_panels(linear: Floats) -> Floats:
    """A stored map (outputs, inputs) as panels (P, inputs, outputs / P)."""
    outputs, inputs = linear.shape
    width = panel_width(inputs, outputs)
    return np.ascontiguousarray(linear.reshape(outputs // width, width, inputs).transpose(0, 2, 1))


def panel_width(inputs: int, outputs: int) -> int:
    """The widest even cut of the outputs whose product with 8 rows takes at most a million multiplications, where
    OpenBLAS (`sgemm_small_matrix_permit`) skips its packing; no cut when only slivers would do."""
    limit = 1_000_000 // (8 * inputs)
    width = next((width for width in range(min(limit, outputs), 0, -1) if outputs % width == 0), 1)
    return width if width >= 16 else outputs


def _halves(linear: Floats, heads: int) -> Floats:
    """Reorder each head's output rows from pairs (0, 1), (2, 3), ... to first members, then second members."""
    outputs, inputs = linear.shape
    pairs = linear.reshape(heads, outputs // heads // 2, 2, inputs)  # (heads, pairs, 2, inputs)
    return pairs.transpose(0, 2, 1, 3).reshape(outputs, inputs)
