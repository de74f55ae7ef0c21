"""A session's KV as bytes: a header that says what it is of, then the payload as the engine keeps it.

Layout: magic, lengths and checksum (`_LENGTHS`), the header as JSON, the payload.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass

import numpy as np

from tasks.ports import TokenIds

_MAGIC = b"genpool-kv-3"
_LENGTHS = struct.Struct("<IQI")  # header bytes, payload bytes, CRC-32 of the payload


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`length` positions, the first `prefilled` of them computed as pieces of the prompt; `payload`: their KV."""

    length: int
    prefilled: int
    payload: memoryview | bytes

    def to_bytes(self, fingerprint: str, prompt: TokenIds) -> bytes:
        """With the fingerprint of the engine, and the prompt (P,) that the session began with, as a digest."""
        document = {
            "fingerprint": fingerprint,
            "length": self.length,
            "prefilled": self.prefilled,
            "prompt": _digest(prompt),
        }
        header = json.dumps(document).encode()
        lengths = _LENGTHS.pack(len(header), len(self.payload), zlib.crc32(self.payload))
        return b"".join((_MAGIC, lengths, header, self.payload))

    @classmethod
    def from_bytes(cls, blob: bytes, fingerprint: str, prompt: TokenIds) -> Snapshot | None:
        """None for bytes that are damaged, of another fingerprint or of another prompt."""
        start = len(_MAGIC) + _LENGTHS.size
        if len(blob) < start or not blob.startswith(_MAGIC):
            return None
        header_bytes, payload_bytes, checksum = _LENGTHS.unpack_from(blob, len(_MAGIC))
        payload = memoryview(blob)[start + header_bytes :]
        if payload.nbytes != payload_bytes or zlib.crc32(payload) != checksum:
            return None
        try:
            header = json.loads(blob[start : start + header_bytes])
            if header["fingerprint"] != fingerprint or header["prompt"] != _digest(prompt):
                return None
            return cls(int(header["length"]), int(header["prefilled"]), payload)
        except (ValueError, KeyError, TypeError):
            return None


def _digest(tokens: TokenIds) -> str:
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()
