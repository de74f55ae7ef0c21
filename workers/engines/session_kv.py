"""Keys and values of one session, for all layers, in growing arrays; and their form as bytes."""

from __future__ import annotations

import json
import struct
import zlib

import numpy as np

from workers.engines.llama_weights import Floats, LlamaConfig

_MAGIC = b"genpool-kv-1"
_LENGTHS = struct.Struct("<IQI")  # header bytes, payload bytes, CRC-32 of the payload
_BLOCK = 64


class SessionKV:
    """`keys` (layers, kv_heads, capacity, head_dim) and `values` (layers, kv_heads, capacity, head_dim + 1) float32.

    The extra column of `values` is ones: the product of attention weights and values then holds the weights' sum, the
    softmax denominator, computed in the same order as the numerator. Positions beyond `length` hold finite numbers.
    """

    __slots__ = ("_context_length", "keys", "length", "values")

    def __init__(self, config: LlamaConfig, *, positions: int) -> None:
        self._context_length = config.context_length
        self.length = 0
        capacity = self._rounded(positions)
        self.keys: Floats = np.zeros((config.layers, config.kv_heads, capacity, config.head_dim), np.float32)
        self.values: Floats = np.zeros((config.layers, config.kv_heads, capacity, config.head_dim + 1), np.float32)
        self.values[..., -1] = 1.0

    @property
    def capacity(self) -> int:
        """Positions that fit without growing."""
        return int(self.keys.shape[2])

    def reserve(self, positions: int) -> None:
        """Make room for `positions` in all; grows by a quarter at least, so that growing stays cheap."""
        if positions <= self.capacity:
            return
        capacity = self._rounded(max(positions, self.capacity + self.capacity // 4))
        keys, values = _grown(self.keys, capacity), _grown(self.values, capacity)
        values[..., self.length :, -1] = 1.0
        self.keys, self.values = keys, values

    def prefix(self, config: LlamaConfig, positions: int) -> SessionKV:
        """A copy of the first `positions`."""
        copy = SessionKV(config, positions=positions)
        copy.keys[:, :, :positions] = self.keys[:, :, :positions]
        copy.values[:, :, :positions] = self.values[:, :, :positions]
        copy.length = positions
        return copy

    def to_bytes(self, fingerprint: str) -> bytes:
        """The first `length` positions, with a header that names the engine's fingerprint."""
        header = json.dumps({"fingerprint": fingerprint, "length": self.length}).encode()
        payload = self.keys[:, :, : self.length].tobytes() + self.values[:, :, : self.length, :-1].tobytes()
        lengths = _LENGTHS.pack(len(header), len(payload), zlib.crc32(payload))
        return b"".join((_MAGIC, lengths, header, payload))

    @classmethod
    def from_bytes(cls, config: LlamaConfig, fingerprint: str, blob: bytes) -> SessionKV | None:
        """Inverse of `to_bytes`; None for bytes that are damaged or of another fingerprint."""
        opened = _open(blob, fingerprint)
        if opened is None:
            return None
        length, payload = opened
        keys_shape = (config.layers, config.kv_heads, length, config.head_dim)
        count = config.layers * config.kv_heads * length * config.head_dim
        if not 0 < length <= config.context_length or payload.nbytes != 2 * count * 4:
            return None
        numbers = np.frombuffer(payload, np.float32)
        kv = cls(config, positions=length)
        kv.keys[:, :, :length] = numbers[:count].reshape(keys_shape)
        kv.values[:, :, :length, :-1] = numbers[count:].reshape(keys_shape)
        kv.length = length
        return kv

    def _rounded(self, positions: int) -> int:
        # Whole prefill blocks are read, so the capacity may exceed a context that is no multiple of the block.
        return -(-min(positions, self._context_length) // _BLOCK) * _BLOCK


def _grown(array: Floats, capacity: int) -> Floats:
    """A copy with room for `capacity` positions; the new ones are zero."""
    layers, heads, held, width = array.shape
    grown = np.zeros((layers, heads, capacity, width), np.float32)
    grown[:, :, :held] = array
    return grown


def _open(blob: bytes, fingerprint: str) -> tuple[int, memoryview] | None:
    """Length in positions and payload of a sound snapshot."""
    start = len(_MAGIC) + _LENGTHS.size
    if len(blob) < start or not blob.startswith(_MAGIC):
        return None
    header_bytes, payload_bytes, checksum = _LENGTHS.unpack_from(blob, len(_MAGIC))
    payload = memoryview(blob)[start + header_bytes :]
    if payload.nbytes != payload_bytes or zlib.crc32(payload) != checksum:
        return None
    try:
        header = json.loads(blob[start : start + header_bytes])
        length = int(header["length"])
        known = str(header["fingerprint"])
    except (ValueError, KeyError, TypeError):
        return None
    return (length, payload) if known == fingerprint else None
