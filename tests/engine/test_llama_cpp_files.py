"""What the llama.cpp engine reads, what it refuses by name, and what it says."""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pool.errors import ConfigurationError
from pool.settings import ModelSettings
from tasks.ports import Engine
from tests.engine.conftest import load_small
from tests.engine.driving import prefill, some_tokens
from tests.engine.gguf_writing import write_gguf
from tests.engine.small_model import BYTES_PER_TOKEN, METADATA, VOCABULARY, small_tensors, write_small_model
from workers.engines import load_engine
from workers.engines.llama_cpp_engine import LlamaCpp
from workers.engines.llama_cpp_library import library, requantise

STRINGS: dict[str, list[str]] = json.loads((Path(__file__).parent / "strings.json").read_text(encoding="utf-8"))


def refused(path: Path, **settings: Any) -> str:
    """The message with which a file is refused."""
    with pytest.raises(ConfigurationError) as refusal:
        load_small(path, **settings)
    return refusal.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count", 0),
        ("attention.head_count", 3),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", 3),
        ("attention.key_length", 0),
        ("block_count", 0),
        ("block_count", 2**30),
        ("context_length", 0),
        ("embedding_length", 0),
        ("feed_forward_length", 0),
        ("rope.dimension_count", 0),
        ("attention.head_count", "four"),
    ],
)
def test_hyperparameters_without_sense_are_refused(tmp_path: Path, key: str, value: int | str) -> None:
    """llama.cpp would divide by them."""
    path = write_small_model(tmp_path / "model.gguf", **{key: value})
    message = refused(path)
    assert "model.gguf" in message
    assert key in message or "divide" in message


@pytest.mark.parametrize(
    ("key", "value"), [("block_count", 2), ("block_count", 4), ("embedding_length", 64), ("feed_forward_length", 64)]
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, key: str, value: int) -> None:
    """What llama.cpp says about it is passed on."""
    assert "llama.cpp cannot load model.gguf: " in refused(write_small_model(tmp_path / "model.gguf", **{key: value}))


def test_damaged_files_are_refused(tmp_path: Path, small_path: Path) -> None:
    """Cut short anywhere, or no GGUF file at all, or one with numbers that are none."""
    content, path = small_path.read_bytes(), tmp_path / "model.gguf"
    for length in (0, 3, 20, 1000, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        assert "model.gguf cannot be read as a GGUF file" in refused(path)
    path.write_bytes(b"x" * 1000)
    assert "model.gguf" in refused(path)
    tensors = small_tensors()
    tensors["output_norm.weight"] = tensors["output_norm.weight"] * np.float32(np.nan)
    write_gguf(path, metadata=METADATA, tensors=tensors, vocabulary=VOCABULARY)
    assert "llama.cpp cannot load model.gguf" in refused(path)


def test_settings_out_of_range_are_refused(small_path: Path) -> None:
    """Each names what is wrong and the numbers."""
    assert (
        "built without support for a GPU" in refused(small_path, gpu_layers=1) or library().llama_supports_gpu_offload()
    )
    assert f"take {6 * 256 * BYTES_PER_TOKEN}" in refused(small_path, kv_budget_bytes=1000)
    assert "sequences, not 300" in refused(small_path, target_inflight=298, kv_budget_bytes=2**30)
    with pytest.raises(ConfigurationError, match="for the backend numpy"):
        load_engine("x", ModelSettings(backend="llama_cpp", source="random:1"), weights=None)


def test_a_budget_is_shared_out_in_equal_slots(small_path: Path) -> None:
    """No more than the model's context each."""
    for positions, expected in ((256, 256), (511, 256), (512, 512), (2048, 2048), (9999, 2048)):
        engine = load_small(small_path, slots=3, target_inflight=2, kept_prefixes=1,
                            kv_budget_bytes=3 * positions * BYTES_PER_TOKEN)  # fmt: skip
        assert engine.capability().max_positions == engine.context_length == expected
        assert engine.kv_usage().total == 3 * expected
        assert engine.bytes_per_token == BYTES_PER_TOKEN
        engine.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to type."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.delitem(sys.modules, "llama_cpp.llama_cpp", raising=False)
    with pytest.raises(ConfigurationError, match=r"make llama.*genpool\[llama\]"):
        library.__wrapped__()


def test_the_library_is_silent(
    small_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it writes by itself are debug lines, and nothing of a prompt is among them."""
    # Celery, where another test has started it in this process, prints what is logged.
    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])
    with caplog.at_level(logging.DEBUG, "genpool.llama_cpp"):
        engine = load_small(small_path)
        prefill(engine, "a", some_tokens(engine, 20))
        engine.close()
    lines = [record for record in caplog.records if record.name == "genpool.llama_cpp"]
    assert len(lines) > 10
    assert {record.levelno for record in lines} == {logging.DEBUG}
    assert capfd.readouterr() == ("", "")


def test_a_file_that_cannot_be_requantised_is_named(tmp_path: Path) -> None:
    """And nothing is left where the new one would be."""
    path, target = tmp_path / "model.gguf", tmp_path / "new.gguf"
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigurationError, match=r"model\.gguf cannot be requantised: "):
        requantise(path, target, 2)
    assert not target.exists()


def test_tokens_are_llama_cpps(llama_smollm2: Engine) -> None:
    """The vocabulary that API nodes get gives the ids that llama.cpp gives itself, for texts of many scripts."""
    assert isinstance(llama_smollm2, LlamaCpp)
    lib = library()
    vocabulary = lib.llama_model_get_vocab(llama_smollm2._context._model)
    for texts in STRINGS.values():
        for text in texts:
            for special in (False, True):
                raw = text.encode()
                room = (ctypes.c_int32 * (len(raw) + 16))()
                count = lib.llama_tokenize(vocabulary, raw, len(raw), room, len(room), False, special)
                assert llama_smollm2.vocabulary.encode(text, special=special) == list(room[:count]), text


def test_smollm2_requantised_is_exact(llama_smollm2: Engine) -> None:
    """The shipped quantisation keeps the recipe's promise on this machine."""
    assert isinstance(llama_smollm2, LlamaCpp)
    assert llama_smollm2.tested.batch_invariant
    assert llama_smollm2.tested.threads_invariant
