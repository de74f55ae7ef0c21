"""The container format of GGUF files: metadata and tensors, nothing about models.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian): magic, version,
number of tensors, number of keys; the keys with typed values; the tensors' names, shapes, types and offsets; padding;
the tensors' bytes. The `gguf` package reads the same, but a string at a time through numpy, which takes seconds for a
vocabulary; this reader takes milliseconds. Sizes of quantised types come from the package.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from pool.errors import ConfigurationError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`shape` as (outputs, inputs), the row's numbers last; `data` the raw bytes, mapped from the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """`metadata`: values by key, arrays as lists; `tensors` by name."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def open_gguf(path: Path) -> GGUFFile:
    """Read the metadata and map the tensors. Raises ConfigurationError for anything but a sound GGUF file."""
    try:
        content: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        return _parse(content)
    except (OSError, ValueError, struct.error, KeyError, OverflowError, MemoryError) as error:
        raise ConfigurationError(f"{path.name} cannot be read as a GGUF file: {error}.", param="source") from None


def _parse(content: npt.NDArray[np.uint8]) -> GGUFFile:
    cursor = _Cursor(content.data)
    if cursor.take(4) != _MAGIC:
        raise ValueError("it does not begin with the magic bytes")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version} is not known")
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.string(): cursor.value() for _ in range(key_count)}
    headers = [_tensor_header(cursor) for _ in range(tensor_count)]
    alignment = metadata.get(_ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError("the alignment is no positive number")
    start = -(-cursor.at // alignment) * alignment
    return GGUFFile(metadata, {header[0]: _tensor(content, start, *header) for header in headers})


def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """Name, shape with the row's numbers last, type, offset."""
    name = cursor.string()
    dimensions = cursor.number("I")
    if dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"the tensor {name} has {dimensions} dimensions")
    sizes = tuple(cursor.number("Q") for _ in range(dimensions))
    return name, sizes[::-1], GGMLQuantizationType(cursor.number("I")), cursor.number("Q")


def _tensor(
    content: npt.NDArray[np.uint8],
    start: int,
    name: str,
    shape: tuple[int, ...],
    kind: GGMLQuantizationType,
    offset: int,
) -> StoredTensor:
    block_numbers, block_bytes = GGML_QUANT_SIZES[kind]
    numbers = 1
    for size in shape:
        numbers *= size
    if shape and shape[-1] % block_numbers:
        raise ValueError(f"rows of the tensor {name} are no whole blocks")
    begin, length = start + offset, numbers // block_numbers * block_bytes
    if begin + length > len(content):
        raise ValueError(f"the tensor {name} reaches beyond the file's end")
    return StoredTensor(name, shape, kind, content[begin : begin + length])


class _Cursor:
    """Reads values one after another. Raises ValueError or struct.error at the file's end."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self._content) - self.at:
            raise ValueError("it is cut short")
        self.at += count
        return bytes(self._content[self.at - count : self.at])

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._content, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self) -> Any:
        """One typed value; arrays as lists. Arrays of arrays are refused: no model has them."""
        kind = GGUFValueType(self.number("I"))
        return self._array() if kind == GGUFValueType.ARRAY else self._reader(kind)()

    def _reader(self, kind: GGUFValueType) -> Callable[[], Any]:
        if kind == GGUFValueType.STRING:
            return self.string
        code = _SCALARS[kind]
        return lambda: self.number(code)

    def _array(self) -> list[Any]:
        kind, count = GGUFValueType(self.number("I")), self.number("Q")
        if kind in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[kind])
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self.take(count * size)))
        read = self._reader(kind)
        return [read() for _ in range(count)]
