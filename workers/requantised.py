"""Known weights in another quantisation than they are published in: the source `NAME:q4_0`.

llama.cpp makes the file on this machine, from the published one, into the same folder of the model cache. Its bytes may
differ from another machine's, so its SHA-256 is not known beforehand; it is recorded beside it when it is made, with
that of what it was made from, and compared from then on.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

#: Quantisations that a source may ask for, by the number of llama.cpp's `llama_ftype`.
FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7}


@dataclass(frozen=True, slots=True)
class Record:
    """Of a requantised file: its SHA-256, that of its original, and the llama.cpp that made it."""

    sha256: str
    original_sha256: str
    made_by: str


def split(source: str) -> tuple[str, str]:
    """A source's name and its file type; the type is empty where the source asks for none that there is."""
    name, _, file_type = source.rpartition(":")
    return (name, file_type) if file_type in FILE_TYPES else (source, "")


def requantised_path(original: Path, file_type: str) -> Path:
    """Where the requantised file of an original is."""
    return original.with_name(f"{original.stem}.{file_type}.gguf")


def requantised_fault(path: Path, original_sha256: str) -> str | None:
    """What is wrong with a requantised file, its content included; None: nothing."""
    if not path.is_file():
        return f"{path} is not there"
    try:
        record = Record(**json.loads(_record_path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return f"{path} has no record of how it was made"
    if record.original_sha256 != original_sha256:
        return f"{path} was made from other weights"
    with path.open("rb") as file:
        intact = hashlib.file_digest(file, "sha256").hexdigest() == record.sha256
    return None if intact else f"{path} is damaged: its SHA-256 differs"


def make_requantised(original: Path, original_sha256: str, file_type: str) -> None:
    """Make the file and its record; each appears in one step, the record last. Raises ConfigurationError where
    llama.cpp is missing or cannot."""
    # Here, because the engines take longer to import than most commands to run.
    from workers.engines.llama_cpp_library import requantise, version  # noqa: PLC0415

    path = requantised_path(original, file_type)
    with tempfile.TemporaryDirectory(prefix=".requantise-", dir=path.parent) as folder:
        part = Path(folder) / path.name
        requantise(original, part, FILE_TYPES[file_type])
        with part.open("rb") as file:
            os.fsync(file.fileno())
            record = Record(hashlib.file_digest(file, "sha256").hexdigest(), original_sha256, version())
        part.replace(path)
        note = Path(folder) / "record"
        note.write_text(json.dumps(asdict(record), indent=2), encoding="utf-8")
        note.replace(_record_path(path))


def _record_path(path: Path) -> Path:
    return path.with_suffix(".json")
