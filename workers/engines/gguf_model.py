"""Reads a Llama-family GGUF file: hyperparameters, weights as float32, tokenizer and chat template.

What the numpy engine would compute wrongly is refused by name: another architecture, scaled or partial rotary
embeddings, quantisations without a decoder, tensors missing, of another shape, or with no place in the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from pool.errors import ConfigurationError
from tasks.vocabulary import CONTROL, Vocabulary, VocabularyData
from workers.engines.gguf_file import StoredTensor, open_gguf
from workers.engines.llama_weights import (
    Floats,
    LayerWeights,
    LlamaConfig,
    LlamaWeights,
    StoredLayer,
    in_panels,
    lay_out,
)

T = TypeVar("T", int, float, str, bool)

#: Tokens that end a turn in the wild, whatever the file's `eos_token_id` says; they count only as control tokens.
TURN_ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "</s>")

_KINDS = {("gpt2", "smollm"): "gpt2-bpe/smollm"}

_LAYER_TENSORS = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def read_gguf(path: Path) -> tuple[LlamaWeights, Vocabulary]:
    """Everything of one model. Raises ConfigurationError for a file this engine cannot run."""
    with ThreadPoolExecutor(max_workers=1) as hashing:
        digest = hashing.submit(sha256, path)
        file = open_gguf(path)
        metadata = _Metadata(path, file.metadata)
        vocabulary = Vocabulary(_vocabulary_data(metadata))
        config = _config(metadata, vocabulary.size)
        weights = _Tensors(path, file.tensors)
        layers = tuple(_layer(config, weights, index) for index in range(config.layers))
        final_norm = weights.take("output_norm.weight", (config.width,))
        table = weights.take("token_embd.weight", (config.vocabulary_size, config.width))
        untied = "output.weight" in weights
        head = in_panels(weights.take("output.weight", table.shape) if untied else table)
        weights.refuse_rest()
        return LlamaWeights(config, layers, final_norm, head, table if untied else None, digest.result()), vocabulary


def read_vocabulary(path: Path) -> tuple[Vocabulary, Mapping[str, Any]]:
    """Tokenizer and chat template of a model for any engine, and the file's keys. Raises ConfigurationError."""
    file = open_gguf(path)
    return Vocabulary(_vocabulary_data(_Metadata(path, file.metadata))), file.metadata


def sha256(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Metadata:
    """Typed access to the file's keys."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Raises ConfigurationError when the key is missing without a default, or of another kind."""
        value = self._values.get(key, default)
        if not isinstance(value, kind):
            state = "lacks" if value is None else "has an unusable"
            raise ConfigurationError(f"{self._path.name} {state} {key}.", param="source")
        return value

    def array(self, key: str) -> list[Any]:
        value = self._values.get(key)
        if not isinstance(value, list):
            raise ConfigurationError(f"{self._path.name} lacks the array {key}.", param="source")
        return value


class _Tensors:
    """The file's tensors, each taken once, as float32."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self._path = path
        self._left = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> Floats:
        """One tensor, dequantised. Raises ConfigurationError when it is missing or of another shape or encoding."""
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise ConfigurationError(f"{self._path.name} lacks the tensor {name}.", param="source")
        if tensor.shape != shape:
            raise ConfigurationError(
                f"{self._path.name}: {name} has the shape {tensor.shape}, not {shape}.", param="source"
            )
        return _dequantised(tensor).reshape(shape)

    def refuse_rest(self) -> None:
        if self._left:
            names = ", ".join(sorted(self._left)[:3])
            raise ConfigurationError(
                f"{self._path.name} has tensors that the numpy engine does not know: {names}.", param="source"
            )


def _config(metadata: _Metadata, vocabulary_size: int) -> LlamaConfig:
    architecture = metadata.get("general.architecture", str)
    if architecture != "llama":
        raise ConfigurationError(f"The numpy engine runs llama, not the architecture {architecture!r}.", param="source")
    scaling = metadata.get("llama.rope.scaling.type", str, "none")
    if scaling != "none" or "llama.rope.scale_linear" in metadata:
        raise ConfigurationError(f"Rotary embeddings scaled by {scaling!r} are not supported.", param="source")
    if metadata.get("llama.expert_count", int, 0):
        raise ConfigurationError("Mixtures of experts are not supported.", param="source")
    width, heads = metadata.get("llama.embedding_length", int), metadata.get("llama.attention.head_count", int)
    if heads < 1 or width % heads:
        raise ConfigurationError(f"{heads} heads do not divide a width of {width}.", param="source")
    config = LlamaConfig(
        layers=metadata.get("llama.block_count", int),
        width=width,
        heads=heads,
        kv_heads=metadata.get("llama.attention.head_count_kv", int, heads),
        head_dim=metadata.get("llama.attention.key_length", int, width // heads),
        ffn_width=metadata.get("llama.feed_forward_length", int),
        vocabulary_size=vocabulary_size,
        context_length=metadata.get("llama.context_length", int),
        rope_base=metadata.get("llama.rope.freq_base", float, 10000.0),
        norm_epsilon=metadata.get("llama.attention.layer_norm_rms_epsilon", float),
    )
    _check_heads(config, metadata)
    return config


def _check_heads(config: LlamaConfig, metadata: _Metadata) -> None:
    rotated = metadata.get("llama.rope.dimension_count", int, config.head_dim)
    if rotated != config.head_dim or config.head_dim % 2:
        raise ConfigurationError(
            f"Rotary embeddings of {rotated} in {config.head_dim} dimensions are not supported.", param="source"
        )
    if metadata.get("llama.attention.value_length", int, config.head_dim) != config.head_dim:
        raise ConfigurationError("Values of another width than keys are not supported.", param="source")
    if config.kv_heads < 1 or config.heads % config.kv_heads:
        raise ConfigurationError(f"{config.kv_heads} KV heads do not divide {config.heads} heads.", param="source")


def _vocabulary_data(metadata: _Metadata) -> VocabularyData:
    model, pre = metadata.get("tokenizer.ggml.model", str), metadata.get("tokenizer.ggml.pre", str, "default")
    if (model, pre) not in _KINDS:
        raise ConfigurationError(
            f"The tokenizer {model!r} with pre-tokenizer {pre!r} is not supported.", param="source"
        )
    tokens = tuple(metadata.array("tokenizer.ggml.tokens"))
    types = tuple(metadata.array("tokenizer.ggml.token_type"))
    ends = {tokens.index(text) for text in TURN_ENDS if text in tokens}
    eos_ids = {token_id for token_id in ends if types[token_id] == CONTROL}
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        if f"tokenizer.ggml.{key}" in metadata:
            eos_ids.add(metadata.get(f"tokenizer.ggml.{key}", int))
    bos = metadata.get("tokenizer.ggml.bos_token_id", int, -1)
    return VocabularyData(
        kind=_KINDS[model, pre],
        tokens=tokens,
        merges=tuple(metadata.array("tokenizer.ggml.merges")),
        token_types=types,
        chat_template=metadata.get("tokenizer.chat_template", str, ""),
        eos_ids=tuple(sorted(eos_ids)),
        bos_id=None if bos < 0 else bos,
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", bool, False),
    )


def _layer(config: LlamaConfig, weights: _Tensors, index: int) -> LayerWeights:
    width, ffn, q, kv = config.width, config.ffn_width, config.query_width, config.kv_width
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (width,),
        "query": (q, width),
        "key": (kv, width),
        "value": (kv, width),
        "output": (width, q),
        "ffn_norm": (width,),
        "gate": (ffn, width),
        "up": (ffn, width),
        "down": (width, ffn),
    }
    taken = {part: weights.take(f"blk.{index}.{name}.weight", shapes[part]) for part, name in _LAYER_TENSORS.items()}
    return lay_out(config, StoredLayer(**taken))


def _dequantised(tensor: StoredTensor) -> Floats:
    decode = _DECODERS.get(tensor.kind)
    if decode is not None:
        return decode(tensor.data)
    try:
        return _by_package(tensor)
    except NotImplementedError:
        raise ConfigurationError(
            f"The quantisation {tensor.kind.name} of {tensor.name} is not supported.", param="source"
        ) from None


def _by_package(tensor: StoredTensor) -> Floats:
    """Any encoding that the `gguf` package decodes; it wants typed numbers for the plain ones."""
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(tensor.kind)
    rows = tensor.data if plain is None else tensor.data.view(plain)
    return np.asarray(dequantize(rows.reshape(-1, len(rows)), tensor.kind), np.float32)


def _q4_1(data: npt.NDArray[np.uint8]) -> Floats:
    """Q4_1: blocks of 32 as float16 scale and minimum, then 16 bytes; low halves are the first 16 numbers."""
    blocks = data.reshape(-1, 20)  # (B, 2 + 2 + 16 bytes)
    scales = blocks[:, :4].copy().view(np.float16).astype(np.float32)  # (B, 2)
    numbers = np.empty((len(blocks), 32), np.float32)
    np.bitwise_and(blocks[:, 4:], 15, out=numbers[:, :16], casting="unsafe")
    np.right_shift(blocks[:, 4:], 4, out=numbers[:, 16:], casting="unsafe")
    numbers *= scales[:, :1]
    numbers += scales[:, 1:]
    return numbers


def _q8_0(data: npt.NDArray[np.uint8]) -> Floats:
    """Q8_0: blocks of 32 as a float16 scale, then 32 signed bytes."""
    blocks = data.reshape(-1, 34)  # (B, 2 + 32 bytes)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)  # (B, 1)
    numbers: Floats = np.multiply(blocks[:, 2:].view(np.int8), scales, dtype=np.float32)
    return numbers


#: Faster than the `gguf` package's own, with the same numbers; for the encodings of the shipped model.
_DECODERS: dict[GGMLQuantizationType, Callable[[npt.NDArray[np.uint8]], Floats]] = {
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}
