"""Weights in another quantisation: made once, of the real ones, checked always, never half there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from pool.errors import ConfigurationError
from workers import requantised
from workers.engines.gguf_file import open_gguf
from workers.weights import SOURCES, cached_path, ensure_weights, known_source, weights_fault

NAME = "smollm2-135m-instruct"
SOURCE = f"{NAME}:q4_0"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file will be: in a cache that has only the published weights."""
    original = ensure_weights(NAME)
    folder = tmp_path / "genpool" / "models" / NAME
    folder.mkdir(parents=True)
    os.link(original, folder / original.name) if _same_device(original, folder) else _copy(original, folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return folder / f"{original.stem}.q4_0.gguf"


def _same_device(path: Path, folder: Path) -> bool:
    return path.stat().st_dev == folder.stat().st_dev


def _copy(path: Path, folder: Path) -> None:
    (folder / path.name).write_bytes(path.read_bytes())


def files_of(folder: Path) -> list[str]:
    """Names of all files in it, without locks."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_a_file_is_made_once_and_checked_always(made: Path) -> None:
    """The first call makes it, with its record; later ones take it; a damaged one is made again, to the same bytes."""
    assert cached_path(SOURCE) is None
    assert weights_fault(SOURCE) == f"{made} is not there"
    assert ensure_weights(SOURCE) == made
    assert weights_fault(SOURCE) is None
    assert cached_path(SOURCE) == made
    record = json.loads(made.with_suffix(".json").read_text())
    assert record["original_sha256"] == SOURCES[NAME].sha256
    stamp = made.stat().st_mtime_ns
    assert ensure_weights(SOURCE) == made
    assert made.stat().st_mtime_ns == stamp
    content = bytearray(made.read_bytes())
    content[5000] ^= 1
    made.write_bytes(content)
    assert weights_fault(SOURCE) == f"{made} is damaged: its SHA-256 differs"
    assert ensure_weights(SOURCE) == made
    assert json.loads(made.with_suffix(".json").read_text())["sha256"] == record["sha256"]
    assert files_of(made.parent) == sorted([SOURCES[NAME].file_name, made.name, made.with_suffix(".json").name])


def test_it_is_what_was_asked_for(made: Path) -> None:
    """Matrices are Q4_0 (embeddings stay finer), and metadata stay those of the original."""
    file = open_gguf(ensure_weights(SOURCE))
    kinds = [tensor.kind for name, tensor in file.tensors.items() if name.endswith(("attn_q.weight", "ffn_up.weight"))]
    assert set(kinds) == {GGMLQuantizationType.Q4_0}
    original = open_gguf(ensure_weights(NAME)).metadata
    assert file.metadata["tokenizer.ggml.tokens"] == original["tokenizer.ggml.tokens"]
    assert made.stat().st_size < SOURCES[NAME].size_bytes


def test_a_file_without_a_fitting_record_is_made_again(made: Path) -> None:
    """No record, one of something else, or one of other weights."""
    ensure_weights(SOURCE)
    record = made.with_suffix(".json")
    good = json.loads(record.read_text())
    for text in ("", "[]", json.dumps(good | {"original_sha256": "0" * 64})):
        record.write_text(text)
        assert weights_fault(SOURCE)
        ensure_weights(SOURCE)
        assert weights_fault(SOURCE) is None
        assert json.loads(record.read_text()) == good


def test_two_at_once_make_one(made: Path) -> None:
    """The second waits for the first and takes its file; what a killed process left is cleared away."""
    leftover = made.parent / ".requantise-old"
    leftover.mkdir()
    (leftover / "part").write_bytes(b"x")
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]\nfrom workers.weights import *\nprint(ensure_weights({SOURCE!r}))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == [str(made)] * 2
    assert files_of(made.parent) == sorted([SOURCES[NAME].file_name, made.name, made.with_suffix(".json").name])


def test_unknown_types_are_refused_by_name() -> None:
    """With those that there are."""
    with pytest.raises(ConfigurationError, match="Behind a colon, one of q4_0, q4_1, q8_0 may follow"):
        ensure_weights(f"{NAME}:q3_k")
    with pytest.raises(ConfigurationError, match=r"No weights at other:q4_0"):
        ensure_weights("other:q4_0")


def test_a_source_knows_where_it_comes_from() -> None:
    """Licence and package are those of the original."""
    assert known_source(SOURCE) is known_source(NAME) is SOURCES[NAME]
    assert known_source("/some/model:q4_0") is None
    assert requantised.split("a:b") == ("a:b", "")
