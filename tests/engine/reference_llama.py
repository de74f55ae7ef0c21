"""A Llama that is only clear: one sequence, all positions at once, float64, weights as files store them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


def reference_logits(
    tensors: Mapping[str, npt.NDArray[np.float32]],
    tokens: npt.NDArray[np.int32],
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    rope_base: float,
    epsilon: float,
) -> Numbers:
    """(T,) -> (T, V). `tensors` by GGUF name."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = weights["token_embd.weight"][tokens]
    for layer in range(layers):
        part = {name.split(".")[2]: weights[name] for name in weights if name.startswith(f"blk.{layer}.")}
        h = _norm(x, part["attn_norm"], epsilon)
        q = _rope(_heads(h @ part["attn_q"].T, heads), rope_base)
        k = _rope(_heads(h @ part["attn_k"].T, kv_heads), rope_base)
        v = _heads(h @ part["attn_v"].T, kv_heads)
        mixed = [_attention(q[:, i], k[:, i * kv_heads // heads], v[:, i * kv_heads // heads]) for i in range(heads)]
        x = x + np.concatenate(mixed, axis=1) @ part["attn_output"].T
        h = _norm(x, part["ffn_norm"], epsilon)
        gate = h @ part["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ part["ffn_up"].T)) @ part["ffn_down"].T
    head = weights.get("output.weight", weights["token_embd.weight"])
    logits: Numbers = _norm(x, weights["output_norm.weight"], epsilon) @ head.T
    return logits


def _norm(x: Numbers, weight: Numbers, epsilon: float) -> Numbers:
    normalised: Numbers = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + epsilon) * weight
    return normalised


def _heads(x: Numbers, heads: int) -> Numbers:
    """(T, heads * D) -> (T, heads, D)."""
    return x.reshape(len(x), heads, -1)


def _rope(x: Numbers, base: float) -> Numbers:
    """Rotate neighbouring pairs, as complex numbers: (T, heads, D)."""
    positions, _, size = x.shape
    frequencies = base ** (-np.arange(0, size, 2) / size)
    turns = np.exp(1j * np.arange(positions)[:, None] * frequencies)[:, None]
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turns
    return np.stack((turned.real, turned.imag), axis=-1).reshape(x.shape)


def _attention(q: Numbers, k: Numbers, v: Numbers) -> Numbers:
    """(T, D) each, causal."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    scores[np.triu_indices(len(q), 1)] = -np.inf
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    mixed: Numbers = shares / shares.sum(axis=1, keepdims=True) @ v
    return mixed
