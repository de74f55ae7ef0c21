"""A GGUF file as the folder that other frameworks load."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer

from benchmarks.checkpoint import write_checkpoint
from tests.engine.gguf_writing import write_gguf
from tests.engine.small_model import HEADS, KV_HEADS, METADATA, VOCABULARY, small_tensors, write_small_model


def stored(folder: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The checkpoint's tensors by name, read by the format's own description."""
    content = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16"
            start, end = entry["data_offsets"]
            upper = np.frombuffer(data[start:end], "<u2").astype(np.uint32) << 16
            found[name] = upper.view(np.float32).reshape(entry["shape"])
    return found


def test_the_numbers_are_the_files(tmp_path: Path) -> None:
    """Rounded to bfloat16, which keeps eight bits; all of them, under the names that others know."""
    write_checkpoint(write_small_model(tmp_path / "a.gguf", kind=GGMLQuantizationType.F32), tmp_path / "out")
    found, tensors = stored(tmp_path / "out"), small_tensors()
    assert len(found) == len(tensors)
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} < set(found)
    for ours, theirs in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj")):
        expected = tensors[f"blk.1.{ours}.weight"]
        np.testing.assert_allclose(found[f"model.layers.1.{theirs}.weight"], expected, rtol=2**-8)


def test_pairs_of_the_rotary_embedding_are_halves(tmp_path: Path) -> None:
    """Output 2 i + j of a head in the file is output i of half j; so for queries and keys, and nothing else."""
    write_checkpoint(write_small_model(tmp_path / "a.gguf", kind=GGMLQuantizationType.F32), tmp_path / "out")
    found, tensors = stored(tmp_path / "out"), small_tensors()
    for ours, theirs, heads in (("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)):
        rows = np.split(tensors[f"blk.2.{ours}.weight"], heads)
        expected = np.concatenate([row for head in rows for row in (head[0::2], head[1::2])])
        np.testing.assert_allclose(found[f"model.layers.2.self_attn.{theirs}.weight"], expected, rtol=2**-8)


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    """To what their scale allows."""
    write_checkpoint(write_small_model(tmp_path / "a.gguf", kind=GGMLQuantizationType.Q8_0), tmp_path / "out")
    found, expected = stored(tmp_path / "out"), small_tensors()["blk.0.ffn_up.weight"]
    np.testing.assert_allclose(found["model.layers.0.mlp.up_proj.weight"], expected, atol=np.abs(expected).max() / 64)


def test_a_text_has_the_same_tokens(tmp_path: Path) -> None:
    """Control tokens are parsed, all else is split alike; the configuration names the sizes and the tied head."""
    tensors = {name: tensor for name, tensor in small_tensors().items() if name != "output.weight"}
    write_gguf(tmp_path / "a.gguf", metadata=METADATA, tensors=tensors, vocabulary=VOCABULARY)
    write_checkpoint(tmp_path / "a.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    control = next(token for i, token in enumerate(VOCABULARY.data.tokens) if VOCABULARY.is_control(i))
    for text in ("The end of 12345.", f"{control}Héllo  there\n{control}"):
        assert tokenizer.encode(text).ids == VOCABULARY.encode(text, special=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (VOCABULARY.size, True)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    """By name."""
    write_gguf(tmp_path / "a.gguf", metadata={}, tensors={}, vocabulary=VOCABULARY, architecture="gemma3")
    with pytest.raises(ValueError, match="no Llama"):
        write_checkpoint(tmp_path / "a.gguf", tmp_path / "out")
