"""What differs between servers over HTTP: how a generation is asked for, and how its output is read.

Two kinds. One takes the prompt as token ids and tells those of its output: then text, stop strings and ends are made
here, as for an engine in the process, and a lost generation goes on from its log. The other takes messages or text, and
tells text.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pool.store.log import TokenLogprobs
from tasks.ports import Generation

_MASK = 2**31 - 1


@dataclass(slots=True)
class Ask:
    """One request. `path`: below the API's base URL, or from the server's root if it begins with a slash; `whole`: the
    answer comes in one piece, not as a stream."""

    path: str
    body: dict[str, Any]
    whole: bool = False


@dataclass(slots=True)
class News:
    """What one event of an answer tells. `finish`: why the output ended, "" while it goes on; `over`: nothing follows.
    Counts are None where it says nothing of them. `made`: tokens that the server has made in this answer so far."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str = ""
    over: bool = False
    made: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


class Dialect(Protocol):
    """One kind of server. `lacks`: options of a request that it has not."""

    @property
    def lacks(self) -> tuple[str, ...]: ...

    @property
    def logprobs(self) -> bool: ...

    def ask(self, generation: Generation, choice: int, known: Sequence[int], *, whole: bool) -> Ask:
        """The request for what follows the token ids `known` of a choice. `whole`: ask for a few tokens at once, whose
        ids must all be told."""
        ...

    def read(self, data: str) -> News:
        """One event, or a whole answer. Raises UpstreamFailure."""
        ...


def upstream_seed(seed: int, choice: int, position: int) -> int:
    """The seed of a request for what follows `position` tokens of a choice: 31 bits. A choice that goes on must not
    draw the numbers of its beginning again."""
    if position == 0:
        return (seed + choice) & _MASK
    digest = hashlib.blake2b(
        struct.pack("<QQQ", seed, choice, position), digest_size=8, person=b"genpool-seed"
    ).digest()
    return int.from_bytes(digest, "little") & _MASK
