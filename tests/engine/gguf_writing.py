"""Writes GGUF files with the `gguf` package: an independent hand for what the engine reads by its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from tasks.vocabulary import Vocabulary

Floats = npt.NDArray[np.float32]


def write_gguf(
    path: Path,
    *,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Floats],
    vocabulary: Vocabulary,
    architecture: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> None:
    """A model of any metadata (keys without the architecture's prefix) and tensors; matrices are stored as `kind`."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_key_value(f"{architecture}.{key}", value, _type_of(value))
    data = vocabulary.data
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(data.tokens))
    writer.add_token_types(list(data.token_types))
    writer.add_token_merges(list(data.merges))
    writer.add_eos_token_id(data.eos_ids[-1])
    writer.add_chat_template(data.chat_template)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    _finish(writer)


def dequantised_copy(source: Path, target: Path) -> None:
    """The same model with every tensor as float32. The target appears in one step."""
    reader = GGUFReader(source)
    unfinished = target.with_suffix(f".{os.getpid()}")
    writer = GGUFWriter(unfinished, str(reader.fields["general.architecture"].contents()))
    skipped = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, field in reader.fields.items():
        if name not in skipped and not name.startswith("GGUF."):
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    _finish(writer)
    unfinished.replace(target)


def _type_of(value: Any) -> GGUFValueType:
    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    return kinds[type(value)]


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
