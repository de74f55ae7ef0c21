"""Reading GGUF files: what runs is computed rightly, what cannot run is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from pool.errors import ConfigurationError
from pool.settings import ModelSettings
from tests.engine.driving import decode, prefill, same_bits
from tests.engine.gguf_writing import Floats, write_gguf
from tests.engine.reference_llama import reference_logits
from workers.engines import load_engine
from workers.engines.gguf_file import open_gguf
from workers.engines.gguf_model import read_gguf
from workers.engines.tiny import tiny_vocabulary

WIDTH, FFN, LAYERS, HEAD_DIM = 64, 96, 2, 16
VOCABULARY = tiny_vocabulary()


def metadata(kv_heads: int = 2) -> dict[str, Any]:
    return {
        "block_count": LAYERS,
        "context_length": 64,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "attention.head_count": WIDTH // HEAD_DIM,
        "attention.head_count_kv": kv_heads,
        "rope.freq_base": 1000.0,
        "attention.layer_norm_rms_epsilon": 0.001,
        "rope.dimension_count": HEAD_DIM,
    }


def tensors(kv_heads: int = 2, *, tied: bool = True) -> dict[str, Floats]:
    """Random weights, none of them special: norms that scale each dimension differently included."""
    rng = np.random.default_rng(5)

    def matrix(outputs: int, inputs: int) -> Floats:
        return rng.standard_normal((outputs, inputs), dtype=np.float32) * np.float32(1.5 / np.sqrt(inputs))

    def norm() -> Floats:
        return rng.uniform(0.5, 1.5, WIDTH).astype(np.float32)

    made = {"token_embd.weight": matrix(VOCABULARY.size, WIDTH), "output_norm.weight": norm()}
    if not tied:
        made["output.weight"] = matrix(VOCABULARY.size, WIDTH)
    for layer in range(LAYERS):
        parts = {
            "attn_norm": norm(),
            "attn_q": matrix(WIDTH, WIDTH),
            "attn_k": matrix(kv_heads * HEAD_DIM, WIDTH),
            "attn_v": matrix(kv_heads * HEAD_DIM, WIDTH),
            "attn_output": matrix(WIDTH, WIDTH),
            "ffn_norm": norm(),
            "ffn_gate": matrix(FFN, WIDTH),
            "ffn_up": matrix(FFN, WIDTH),
            "ffn_down": matrix(WIDTH, FFN),
        }
        made |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in parts.items()}
    return made


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_definition(tmp_path: Path, kv_heads: int, tied: bool) -> None:
    """Grouped, single and plain attention heads, tied and separate output: as a plain implementation computes them."""
    weights = tensors(kv_heads, tied=tied)
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata=metadata(kv_heads), tensors=weights, vocabulary=VOCABULARY)
    engine = load_engine("file", ModelSettings(source=str(path)), weights=path)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY.size, 40).astype(np.int32)
    expected = reference_logits(
        weights, tokens, layers=LAYERS, heads=WIDTH // HEAD_DIM, kv_heads=kv_heads, rope_base=1000.0, epsilon=0.001
    )
    rows = [prefill(engine, "a", tokens[:35]), *decode(engine, "a", tokens[35:].tolist(), 35)]
    assert np.abs(np.array(rows) - expected[34:]).max() < 1e-4


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]
)
def test_encodings_are_decoded_as_the_package_does(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Each encoding gives the logits of the same numbers stored as float32."""
    plain, encoded = tmp_path / "plain.gguf", tmp_path / "encoded.gguf"
    write_gguf(encoded, metadata=metadata(), tensors=tensors(), vocabulary=VOCABULARY, kind=kind)
    from_package = {tensor.name: tensor for tensor in GGUFReader(encoded).tensors}
    write_gguf(plain, metadata=metadata(), tensors=_dequantised(from_package), vocabulary=VOCABULARY)
    tokens = np.arange(20, dtype=np.int32)
    expected, decoded = (
        prefill(load_engine("file", ModelSettings(source=str(path)), weights=path), "a", tokens)
        for path in (plain, encoded)
    )
    assert same_bits([decoded], [expected])


def _dequantised(by_name: dict[str, Any]) -> dict[str, Floats]:
    return {name: dequantize(tensor.data, tensor.tensor_type) for name, tensor in by_name.items()}


def test_the_reader_agrees_with_the_package(smollm2_path: Path) -> None:
    """Keys, values, names, shapes and bytes of a real file are those that the `gguf` package reads."""
    ours, theirs = open_gguf(smollm2_path), GGUFReader(smollm2_path)
    keys = [name for name in theirs.fields if not name.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    short = [name for name in keys if not name.startswith(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))]
    assert {name: ours.metadata[name] for name in short} == {name: theirs.fields[name].contents() for name in short}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        stored = ours.tensors[tensor.name]
        assert stored.shape == tuple(reversed(tensor.shape.tolist()))
        assert stored.kind == tensor.tensor_type
        assert np.array_equal(stored.data, tensor.data.view(np.uint8).reshape(-1))


Change = Callable[[dict[str, Any], dict[str, Floats]], object]


def _set(key: str, value: Any) -> Change:
    return lambda meta, _: meta.__setitem__(key, value)


def _drop(name: str) -> Change:
    return lambda meta, weights: (meta if name in meta else weights).pop(name)


def _put(name: str, *shape: int) -> Change:
    return lambda _, weights: weights.__setitem__(name, np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(_drop("blk.1.ffn_up.weight"), r"lacks the tensor blk\.1\.ffn_up\.weight", id="missing tensor"),
        pytest.param(_put("blk.0.attn_q.bias", WIDTH), r"blk\.0\.attn_q\.bias", id="unknown tensor"),
        pytest.param(_put("rope_freqs.weight", HEAD_DIM // 2), r"rope_freqs\.weight", id="rope factors"),
        pytest.param(_put("blk.0.attn_q.weight", 32, WIDTH), r"shape \(32, 64\), not \(64, 64\)", id="another shape"),
        pytest.param(_set("rope.scaling.type", "yarn"), "yarn", id="rope scaling"),
        pytest.param(_set("rope.dimension_count", 8), "8 in 16 dimensions", id="partial rope"),
        pytest.param(_set("expert_count", 4), "experts", id="experts"),
        pytest.param(_set("attention.head_count_kv", 3), "3 KV heads", id="uneven heads"),
        pytest.param(_set("attention.value_length", 8), "another width", id="narrow values"),
        pytest.param(_drop("block_count"), r"lacks llama\.block_count", id="missing key"),
        pytest.param(_set("block_count", "two"), r"unusable llama\.block_count", id="key of another type"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, change: Change, named: str) -> None:
    """Each unsupported property of a file is a configuration error that names it."""
    meta, weights = metadata(), tensors()
    change(meta, weights)
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata=meta, tensors=weights, vocabulary=VOCABULARY)
    with pytest.raises(ConfigurationError, match=named) as caught:
        read_gguf(path)
    assert str(tmp_path) not in caught.value.message


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    """A model of another family is named."""
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata=metadata(), tensors=tensors(), vocabulary=VOCABULARY, architecture="qwen2")
    with pytest.raises(ConfigurationError, match="qwen2"):
        read_gguf(path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """A file cut anywhere, or changed in its first bytes, is a configuration error, never a crash."""
    whole, path = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    write_gguf(whole, metadata=metadata(), tensors=tensors(), vocabulary=VOCABULARY)
    content = whole.read_bytes()
    cuts = [content[:length] for length in (0, 3, 4, 20, 24, 100, 1000, 9_000, 20_000, len(content) - 1)]
    changed = [content[:at] + b"\xff" * 4 + content[at + 4 :] for at in (0, 4, 8, 12, 16, 24, 28, 60)]
    for damaged in cuts + changed:
        path.write_bytes(damaged)
        with pytest.raises(ConfigurationError, match=r"cut\.gguf"):
            read_gguf(path)
    with pytest.raises(ConfigurationError, match=r"missing\.gguf"):
        read_gguf(tmp_path / "missing.gguf")


def test_smollm2_is_read_with_its_tokenizer(smollm2_path: Path) -> None:
    """The shipped model's figures, end tokens and template."""
    weights, vocabulary = read_gguf(smollm2_path)
    config = weights.config
    assert (config.layers, config.width, config.heads, config.kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.ffn_width, config.context_length, config.rope_base) == (1536, 8192, 100_000.0)
    assert weights.embedding is None
    assert (vocabulary.size, vocabulary.eos_ids) == (49_152, (0, 2))
    assert "<|im_start|>" in vocabulary.data.chat_template


@pytest.mark.parametrize("source", ["random:", "random:x", "random:-1", "random:1234567890"])
def test_malformed_random_sources_are_refused(source: str) -> None:
    """`random:` wants a seed."""
    with pytest.raises(ConfigurationError, match="random:SEED"):
        load_engine("tiny", ModelSettings(source=source), weights=None)


def test_a_model_needs_weights() -> None:
    """Without a file there is nothing to load."""
    with pytest.raises(ConfigurationError, match="no weights"):
        load_engine("m", ModelSettings(source="smollm2-135m-instruct"), weights=None)
