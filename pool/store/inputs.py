"""Inputs of jobs: small ones inside the record, larger ones in blocks that are stored once however often they are sent.

Agents send their whole history with every turn. A large input is cut at places that depend on nothing but the distance
from its beginning, so a history that has grown shares all but its last block with what was stored before. A block's id
is a hash over tenant and content: equal content is one block, and tenants never share any. Blocks are compressed.

An unended job holds its blocks by name (lua/lib/hold.lua); the script that ends it lets them go (lua/lib/inputs.lua).
A block that nobody holds goes at once, or, when `store` keeps the input, together with the last record that keeps it,
be it that this one expires or that its owner deletes it (lua/lib/kept.lua).
An ended job has no use for its packed prompt, so that one never stays, and neither does an input with `store: false`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pool.errors import GenerationFailed
from pool.store.connection import Client, state_errors
from pool.store.ids import JobRef
from pool.store.keys import ModelKeys, keys_of
from pool.store.records import NewJob
from pool.store.running import run_many
from pool.store.scripts import Command, Value

#: Prompt and input up to this size, together, stay in the record: a block costs about 500 bytes beside its content.
INLINE_BYTES = 4096
#: Size of the blocks of the first 256 KiB.
BLOCK_BYTES = 16 * 1024
#: Further on a block is at least this part of all that lies before it, so that even a long input needs few: 8 MiB are
#: 56 blocks, and an eighth is the most that two inputs with a common beginning can fail to share of it.
GROWTH = 8
#: Histories shrink to 0.38 of their size at level 1, to 0.33 at level 6 in twice the time.
_LEVEL = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of an input, and the id under which its tenant finds it: 32 hex digits."""

    id: str
    content: bytes

    def packed(self) -> bytes:
        """As it is stored."""
        return zlib.compress(self.content, _LEVEL)


@dataclass(slots=True)
class StoredInput:
    """Where a job's prompt and input go: into `fields` of the record (name, value ...), or into `blocks` as well."""

    fields: list[Value]
    blocks: Sequence[Block] = ()


def stored_input(job: NewJob) -> StoredInput:
    """Prompt and input of a new job. An input that nobody may see again is left out when it has been tokenized."""
    given = job.input.encode() if job.store or not job.prompt else b""
    if len(given) + len(job.prompt) <= INLINE_BYTES:
        return StoredInput(["input", given, "prompt", job.prompt])
    prompt = blocks_of(job.tenant, job.prompt)
    blocks = [*prompt, *blocks_of(job.tenant, given)]
    return StoredInput(["blocks", " ".join(block.id for block in blocks), "prompt_blocks", len(prompt)], blocks)


def blocks_of(tenant: str, content: bytes) -> list[Block]:
    """Cut content into blocks."""
    return [Block(block_id(tenant, piece), piece) for piece in _cut(content)]


def block_id(tenant: str, content: bytes) -> str:
    """128 bits of SHA-256 over the tenant, with its length, and the content."""
    name = tenant.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"%d:%s" % (len(name), name) + content).hexdigest()[:32]


def _cut(content: bytes) -> Iterator[bytes]:
    """A block at offset x is an eighth of the largest power of two up to x, and at least BLOCK_BYTES."""
    start = 0
    while start < len(content):
        size = max(BLOCK_BYTES, (1 << start.bit_length() - 1) // GROWTH if start else 0)
        yield content[start : start + size]
        start += size


def fetch(client: Client, keys: ModelKeys, tenant: str, ids: Sequence[str]) -> bytes:
    """The content of blocks, in order, in one round trip.

    Raises GenerationFailed (`input_lost`) when a block is missing or is not what its id says.
    """
    pipe = client.pipeline(transaction=False)
    for each in ids:
        pipe.hget(keys.input(each), "data")
    stored = pipe.execute(raise_on_error=False)
    return b"".join(_opened(tenant, *pair) for pair in zip(ids, stored, strict=True))


def _opened(tenant: str, wanted: str, packed: Any) -> bytes:
    try:
        content = zlib.decompress(packed) if isinstance(packed, bytes) else None
    except zlib.error:
        content = None
    if content is None or block_id(tenant, content) != wanted:
        raise GenerationFailed("A part of its stored input is missing or damaged.", code="input_lost")
    return content


def read_input(client: Client, ref: JobRef) -> str | None:
    """The JSON of a job's prompt as it was given; None when there is no such job or its input was not kept.

    Raises GenerationFailed (`input_lost`) and StateUnavailable.
    """
    keys = keys_of(ref)
    with state_errors():
        given, tenant, blocks, prompt_blocks = client.hmget(
            keys.job(ref.token), "input", "tenant", "blocks", "prompt_blocks"
        )
        if blocks is not None:
            given = fetch(client, keys, tenant.decode(), blocks.decode().split()[int(prompt_blocks) :])
    return given.decode() if given else None


def run_endings(client: Client, items: Sequence[T], ending: Callable[[T, Sequence[str]], Command]) -> list[list[Any]]:
    """Run a verb that may end jobs, one command an item; the replies in order.

    `ending(item, ids)` builds the command that declares these blocks. A caller that has not read the record knows of
    none; the script then changes nothing and names them, and is run again.
    """
    replies = run_many(client, [ending(item, ()) for item in items])
    again = {at: reply[1].decode().split() for at, reply in enumerate(replies) if reply[0] == b"blocks"}
    for at, reply in zip(again, run_many(client, [ending(items[at], again[at]) for at in again]), strict=True):
        replies[at] = reply
    return replies
