"""KV as bytes, of a session or of what is kept for a holder: a header that says what it is of, then the payload as the
engine keeps it.

Layout: magic, lengths and checksum (`_LENGTHS`), the header as JSON, the payload.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass

import numpy as np

from tasks.ports import Kept, KVRefused, TokenIds

_MAGIC = b"genpool-kv-4"
_LENGTHS = struct.Struct("<IQI")  # header bytes, payload bytes, CRC-32 of the payload


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`length` positions, the first `prefilled` of them computed as pieces of the prompt; `payload`: their KV."""

    length: int
    prefilled: int
    payload: memoryview | bytes

    def to_bytes(self, fingerprint: str, prompt: TokenIds, scope: str | None = None) -> bytes:
        """With the fingerprint of the engine and, as a digest, the prompt (P,) that the session began with; of what is
        kept for a holder its tokens, and its scope."""
        document = {
            "fingerprint": fingerprint,
            "length": self.length,
            "prefilled": self.prefilled,
            "of": _digest(prompt, scope),
        }
        header = json.dumps(document).encode()
        lengths = _LENGTHS.pack(len(header), len(self.payload), zlib.crc32(self.payload))
        return b"".join((_MAGIC, lengths, header, self.payload))

    @classmethod
    def from_bytes(cls, blob: bytes, fingerprint: str, prompt: TokenIds) -> Snapshot | None:
        """A session's. None for bytes that are damaged, of another fingerprint or of another prompt."""
        try:
            return cls._read(blob, fingerprint, _digest(prompt, None))
        except KVRefused:
            return None

    @classmethod
    def of_kept(cls, kept: Kept, fingerprint: str, scope: str) -> Snapshot:
        """What was kept for a holder. Raises KVRefused for bytes that are damaged, of another fingerprint, other tokens
        or another scope."""
        if kept.scope != scope:
            raise KVRefused("it is of another scope")
        return cls._read(kept.blob, fingerprint, _digest(kept.tokens, scope))

    @classmethod
    def _read(cls, blob: bytes, fingerprint: str, digest: str) -> Snapshot:
        start = len(_MAGIC) + _LENGTHS.size
        if len(blob) < start or not blob.startswith(_MAGIC):
            raise KVRefused("it is no KV")
        header_bytes, payload_bytes, checksum = _LENGTHS.unpack_from(blob, len(_MAGIC))
        payload = memoryview(blob)[start + header_bytes :]
        if payload.nbytes != payload_bytes or zlib.crc32(payload) != checksum:
            raise KVRefused("it is damaged")
        try:
            header = json.loads(blob[start : start + header_bytes])
            found = cls(int(header["length"]), int(header["prefilled"]), payload)
            made_by, made_of = header["fingerprint"], header["of"]
        except (ValueError, KeyError, TypeError):
            raise KVRefused("its header is damaged") from None
        if made_by != fingerprint:
            raise KVRefused("it is of another engine")
        if made_of != digest:
            raise KVRefused("it is of other tokens")
        return found


def _digest(tokens: TokenIds, scope: str | None) -> str:
    """Of a session's prompt, where `scope` is None; of a holder's tokens in their scope."""
    where = b"session" if scope is None else b"holder" + hashlib.sha256(scope.encode()).digest()
    return hashlib.sha256(where + np.asarray(tokens, "<i4").tobytes()).hexdigest()
