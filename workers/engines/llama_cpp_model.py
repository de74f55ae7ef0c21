"""From a GGUF file and settings to a llama.cpp engine.

llama.cpp checks names and shapes of what it loads, but divides by what it is told, so hyperparameters are looked at
before it sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pool.errors import ConfigurationError
from pool.settings import ModelSettings
from workers.engines.gguf_file import open_gguf
from workers.engines.gguf_model import read_vocabulary, sha256
from workers.engines.llama_cpp_context import SLOT_UNIT, ContextOptions, LlamaContext
from workers.engines.llama_cpp_engine import LlamaCpp
from workers.engines.llama_cpp_library import library

_KV_BYTES = 2  # of a number: float16


def load_llama_cpp(name: str, settings: ModelSettings, weights: Path, *, threads: int) -> LlamaCpp:
    """Load the model `name` from `weights`. Raises ConfigurationError for a file or settings that cannot be used."""
    library()  # what is missing is said before anything is read
    with ThreadPoolExecutor(max_workers=1) as hashing:
        digest = hashing.submit(sha256, weights)
        vocabulary, metadata = read_vocabulary(weights)
        shape = _Shape(weights, metadata)
        options = ContextOptions(
            slots=settings.target_inflight + settings.kept_prefixes,
            slot_tokens=_slot_tokens(name, settings, shape),
            threads=threads,
            gpu_layers=settings.gpu_layers,
            flash_attention=settings.flash_attention,
        )
        context = LlamaContext(weights, options)
        if context.vocabulary_size != vocabulary.size:
            context.close()
            raise ConfigurationError(
                f"{weights.name} names {vocabulary.size} tokens, but has logits for {context.vocabulary_size}.",
                param="source",
            )
        return LlamaCpp(
            context,
            options,
            vocabulary,
            digest=digest.result(),
            bytes_per_token=shape.bytes_per_token,
            context_length=shape.context_length,
        )


def kv_bytes_per_token(weights: Path) -> int:
    """Bytes of KV a position takes in llama.cpp, in float16. Raises ConfigurationError for a file that is no model."""
    return _Shape(weights, open_gguf(weights).metadata).bytes_per_token


def trained_context(weights: Path) -> int:
    """Positions that the model was made for. Raises ConfigurationError for a file that is no model."""
    return _Shape(weights, open_gguf(weights).metadata).context_length


def _slot_tokens(name: str, settings: ModelSettings, shape: _Shape) -> int:
    """Positions of each slot: an equal share of the budget, no more than the model's context."""
    slots = settings.target_inflight + settings.kept_prefixes
    share = settings.kv_budget_bytes // shape.bytes_per_token // slots // SLOT_UNIT * SLOT_UNIT
    if share == 0:
        least = SLOT_UNIT * slots * shape.bytes_per_token
        raise ConfigurationError(
            f"Model {name}: kv_budget_bytes is {settings.kv_budget_bytes}, but {slots} sequences (target_inflight + "
            f"kept_prefixes) of {SLOT_UNIT} positions take {least}.",
            param="kv_budget_bytes",
        )
    return min(share, -(-shape.context_length // SLOT_UNIT) * SLOT_UNIT)


class _Shape:
    """The hyperparameters that the engine plans with; raises ConfigurationError for numbers that make no sense."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self._architecture = metadata.get("general.architecture")
        if not isinstance(self._architecture, str):
            raise ConfigurationError(f"{path.name} lacks general.architecture.", param="source")
        self.context_length = self._positive("context_length")
        layers, width = self._positive("block_count"), self._positive("embedding_length")
        heads = self._positive("attention.head_count")
        kv_heads = self._positive("attention.head_count_kv", heads)
        if width % heads or heads % kv_heads:
            raise ConfigurationError(
                f"{path.name}: {heads} heads do not divide a width of {width}, or {kv_heads} do not divide {heads}.",
                param="source",
            )
        widths = [self._positive(f"attention.{part}_length", width // heads) for part in ("key", "value")]
        self._positive("feed_forward_length")
        self._positive("rope.dimension_count", widths[0])
        self.bytes_per_token = layers * kv_heads * sum(widths) * _KV_BYTES

    def _positive(self, key: str, default: int | None = None) -> int:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**24:
            state = "lacks" if value is None else "has an unusable"
            raise ConfigurationError(f"{self._path.name} {state} {self._architecture}.{key}.", param="source")
        return value
