"""The scripted engine, for fault tests only: it runs no model. The first line of a prompt says what to do, behind the
last `|` in it (a conversation is written in one line, its messages parted by `|`).

    say TEXT            emit TEXT as byte tokens, one a step, then end
    repeat N TEXT       emit TEXT N times, then end
    pieces HEX HEX ...  emit these bytes, each group as one token of PIECES, then end
    crash AFTER         emit AFTER filler bytes, then kill the process
    raise AFTER         emit AFTER filler bytes, then raise inside each step that it takes part in
    hang AFTER          emit AFTER filler bytes, then never return from the step
    quit AFTER          emit AFTER filler bytes, then end the thread that steps

Each step takes `delay_ms`. The log gets a line for each beginning, each token and each release, over all processes that
share it: `start SESSION ATTEMPT PID TIME`, `tok SESSION N PID` and `free SESSION ATTEMPT PID TIME`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tasks.ports import Logits, Member, StepResult, TokenIds
from tasks.vocabulary import Vocabulary, byte_alphabet
from tests.scripted.blocks import BlockEngine
from workers.engines.tiny import tiny_vocabulary_data

CONTEXT = 65_536
#: Its KV holds so many sessions of full length.
FULL_SESSIONS = 16
BLOCK_TOKENS = 256
#: Tokens of several bytes, which cut characters and words where a vocabulary may.
PIECES = (
    *map(bytes.fromhex, ("20f09f", "98b841", "e282", "ac", "f09f", "ff", "f09f87a9", "f09f87aa")),
    *(b"red ", b"gr", b"ee", b"n sky"),
)
FILLER = b"."
CHAT_TEMPLATE = "{{ messages | map(attribute='content') | join('|') }}{{ '\\n' }}"
HANG_S = 3600


class ScriptedEngine(BlockEngine):
    """A tasks.ports.Engine whose next token depends on the prompt's script and the number of tokens so far."""

    def __init__(
        self,
        *,
        delay_ms: float,
        log_path: Path,
        context_length: int = CONTEXT,
        block_tokens: int = BLOCK_TOKENS,
        max_sessions: int = 4096,
    ) -> None:
        super().__init__(
            blocks=FULL_SESSIONS * -(-context_length // block_tokens),
            block_tokens=block_tokens,
            context_length=context_length,
            snapshot=False,
            max_sessions=max_sessions,
        )
        self.vocabulary = scripted_vocabulary()
        tokens = reversed(range(self.vocabulary.size))
        self._token_of = {self.vocabulary.token_bytes(token): token for token in tokens}
        self._delay_s = delay_ms / 1000
        self._log = log_path.open("a", buffering=1)
        self._begun: set[tuple[str, int]] = set()

    def fingerprint(self) -> str:
        """Every scripted engine gives the same tokens."""
        return "scripted"

    def begin(self, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = "") -> int | None:
        """Log it."""
        found = super().begin(session, epoch, prompt, positions, scope)
        if found is not None:
            self._begun.add((session, epoch))
            self._log.write(f"start {session} {epoch} {os.getpid()} {time.time():.4f}\n")
        return found

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        """One result a member; faults happen as scripted."""
        time.sleep(self._delay_s)
        return super().step(batch)

    def _logits(self, session: str, cells: npt.NDArray[np.int64]) -> Logits:
        row = np.full(self.vocabulary.size, -1e9, dtype=np.float32)
        row[self._next(session, cells.tolist())] = 0.0
        return row

    def _next(self, session: str, tokens: Sequence[int]) -> int:
        """The token that the script gives after these."""
        text = b"".join(self.vocabulary.token_bytes(token) for token in tokens)
        line, _, output = text.partition(b"\n")
        verb, _, rest = line.rpartition(b"|")[2].partition(b" ")
        at = len(output)
        if verb in (b"crash", b"raise", b"hang", b"quit"):
            return self._fault(verb, at, int(rest), session)
        if verb == b"pieces":
            return self._piece(rest.split(), output)
        if verb == b"repeat":
            count, _, piece = rest.partition(b" ")
            rest = piece * int(count)
        self._log.write(f"tok {session} {at} {os.getpid()}\n")
        return self._token_of[rest[at : at + 1]] if at < len(rest) else self.vocabulary.eos_ids[0]

    def _piece(self, pieces: Sequence[bytes], output: bytes) -> int:
        """The token behind those that make up the output."""
        wanted = [bytes.fromhex(piece.decode()) for piece in pieces]
        done = next(count for count in range(len(wanted) + 1) if b"".join(wanted[:count]) == output)
        return self._token_of[wanted[done]] if done < len(wanted) else self.vocabulary.eos_ids[0]

    def _fault(self, verb: bytes, at: int, after: int, session: str) -> int:
        if at < after:
            self._log.write(f"tok {session} {at} {os.getpid()}\n")
            return self._token_of[FILLER]
        if verb == b"crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if verb == b"hang":
            time.sleep(HANG_S)
        if verb == b"quit":
            sys.exit()
        raise RuntimeError("as scripted")

    def release(self, session: str, epoch: int, *, tokens: TokenIds | None = None, holder: str = "") -> None:
        """Log it."""
        super().release(session, epoch, tokens=tokens, holder=holder)
        if (session, epoch) in self._begun:
            self._begun.remove((session, epoch))
            self._log.write(f"free {session} {epoch} {os.getpid()} {time.time():.4f}\n")

    def close(self) -> None:
        """End the log."""
        self._log.close()


def scripted_vocabulary() -> Vocabulary:
    """The tiny one with PIECES as further tokens, which no merge makes: no prompt is cut into them."""
    data, alphabet = tiny_vocabulary_data(), byte_alphabet()
    texts = ("".join(alphabet[byte] for byte in piece) for piece in PIECES)
    # Some of them are tokens already.
    added = tuple(text for text in texts if text not in data.tokens)
    return Vocabulary(
        data.model_copy(
            update={
                "tokens": (*data.tokens, *added),
                "token_types": (*data.token_types, *(1 for _ in added)),
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
