"""What this build of llama.cpp does to the last bit with this model on this machine, found out by trying.

Whether a session's numbers depend on what else is in the batch, on how its prompt was cut, on the number of threads, or
on whether a token was prefilled or decoded is a matter of kernels: of the processor, the quantisation, the build. So it
is tried at every start, with some 700 tokens.

Not only logits are compared but all of the KV: quantised products round small differences away, until one falls on an
edge, so logits of a few tokens may well agree by chance. Kernels differ in the order in which they add up, which shows
only when there is more to add than their lanes hold; hence the length of the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from workers.engines.llama_cpp_context import LlamaContext, Row
from workers.engines.llama_cpp_library import version

#: One prompt, whole and in pieces with a short rest, all beyond what kernels' lanes hold: on the grid, and where it is
#: none of kernels that take four, eight or sixteen rows at once.
PROMPT_TOKENS = 162
PIECES = (96, 64, 2)
FINE_PIECES = (30, 70, 58, 2, 2)
#: Tokens that are decoded alone and beside others.
MORE_TOKENS = 4
#: Tokens that are decoded one by one, and prefilled together: many, because a difference in attention alone shows only
#: where a product rounds it up, about once in ten tokens.
RECOMPUTED_TOKENS = 48
#: Most sequences in a batch that is compared with a single one.
LARGEST_BATCH = 16


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Whether KV and logits are the same bits: in any batch and however a prompt is cut on the grid; and in pieces of
    two tokens or more, wherever they end; and with such pieces of several prompts in one batch; when generated tokens
    are prefilled instead of decoded; with one thread. `bits`: a hash of them, which tells kernels apart."""

    batch_invariant: bool = False
    fine_cuts: bool = False
    packs: bool = False
    recompute_exact: bool = False
    threads_invariant: bool = False
    bits: str = ""


def self_test(context: LlamaContext, *, slots: int, threads: int) -> SelfTest:
    """Try it; every slot is empty before and afterwards."""
    try:
        return _SelfTest(context, min(slots, LARGEST_BATCH), threads).run()
    finally:
        context.set_threads(threads)
        for slot in range(slots):
            context.cut(slot, 0)


def can_recompute() -> bool:
    """Whether it is worth a try: with the kernels of `llamafile`, attention of several tokens of a sequence adds up in
    another order than that of one, which no test of a second shows for certain."""
    return "LLAMAFILE = 1" not in version()


class _Way(IntEnum):
    """Of computing a prompt: in fine pieces beside another's, in fine pieces, in pieces on the grid, only whole."""

    PACKED, FINE, ON_GRID, NONE = range(4)


class _SelfTest:
    """Everything is compared in slot 0: a slot's number is part of its state."""

    def __init__(self, context: LlamaContext, slots: int, threads: int) -> None:
        self._context = context
        self._slots = slots
        self._threads = threads
        random = np.random.default_rng(0)
        self._prompt, self._more, self._others, self._later, self._other_prompt = (
            random.integers(0, context.vocabulary_size, count).tolist()
            for count in (PROMPT_TOKENS, MORE_TOKENS, slots, RECOMPUTED_TOKENS, PROMPT_TOKENS)
        )

    def run(self) -> SelfTest:
        whole = self._prefilled([len(self._prompt)])
        self._context.set_threads(1)
        by_one = self._finest(whole)
        self._context.set_threads(self._threads)
        finest = by_one if by_one is _Way.PACKED else min(by_one, self._finest(whole))
        alone = self._decoded(1)
        sizes = sorted({min(2, self._slots), self._slots})
        invariant = finest < _Way.NONE and all(self._decoded(size) == alone for size in sizes)
        return SelfTest(
            batch_invariant=invariant,
            fine_cuts=invariant and finest <= _Way.FINE,
            packs=invariant and finest <= _Way.PACKED,
            recompute_exact=invariant and can_recompute() and self._recomputed(),
            threads_invariant=self._threads == 1 or by_one < _Way.NONE,
            bits=_hash("".join((whole, alone[0], *alone[1])).encode()) if invariant else "",
        )

    def _finest(self, whole: str) -> _Way:
        """The first way of computing the prompt that gives what computing it as a whole does."""
        if self._packed(FINE_PIECES) == whole:
            return _Way.PACKED
        if self._prefilled(FINE_PIECES) == whole:
            return _Way.FINE
        return _Way.ON_GRID if self._prefilled(PIECES) == whole else _Way.NONE

    def _decoded(self, size: int) -> tuple[str, list[str]]:
        """Decode the further tokens in the first and the last of `size` slots, others between them. Hashes of what the
        last one holds then and of its rows of logits; of nothing where the first one differs."""
        self._context.cut(0, PROMPT_TOKENS)
        for slot in range(1, size):
            self._context.copy(0, slot)
        first: list[str] = []
        last: list[str] = []
        for at, token in enumerate(self._more, start=PROMPT_TOKENS):
            tokens = [token if slot in (0, size - 1) else self._others[slot] for slot in range(size)]
            rows = self._context.decode([Row(slot, each, at, True) for slot, each in enumerate(tokens)])
            first.append(_hash(rows[0].tobytes()))
            last.append(_hash(rows[-1].tobytes()))
        state_of_first = self._state()
        self._context.copy(size - 1, 0)
        state = self._state()
        return (state, last) if (state, last) == (state_of_first, first) else ("", [])

    def _recomputed(self) -> bool:
        """Whether tokens prefilled together leave what they leave when decoded one by one."""
        self._context.cut(0, PROMPT_TOKENS)
        singles = [self._feed([token]) for token in self._later]
        decoded = self._state()
        self._context.cut(0, PROMPT_TOKENS)
        return (self._feed(self._later), self._state()) == (singles[-1], decoded)

    def _prefilled(self, sizes: Sequence[int]) -> str:
        """The hash of what slot 0 holds after the prompt was fed in pieces of these sizes, and of the last logits."""
        self._context.cut(0, 0)
        start = 0
        for size in sizes:
            logits = self._feed(self._prompt[start : start + size])
            start += size
        return _hash((self._state() + logits).encode())

    def _packed(self, sizes: Sequence[int]) -> str:
        """The same, beside another prompt in the same batches."""
        prompts = [self._other_prompt, self._prompt][-self._slots :]
        for slot in range(len(prompts)):
            self._context.cut(slot, 0)
        start = 0
        for size in sizes:
            stop = start + size
            rows = [
                Row(slot, prompt[at], at, at == stop - 1)
                for slot, prompt in enumerate(prompts)
                for at in range(start, stop)
            ]
            logits = _hash(self._context.decode(rows)[-1].tobytes())
            start = stop
        if len(prompts) > 1:
            self._context.copy(1, 0)
        return _hash((self._state() + logits).encode())

    def _feed(self, tokens: Sequence[int]) -> str:
        """The hash of the logits after the tokens."""
        start, last = self._context.held(0), len(tokens) - 1
        rows = [Row(0, token, start + index, index == last) for index, token in enumerate(tokens)]
        return _hash(self._context.decode(rows)[0].tobytes())

    def _state(self) -> str:
        return _hash(self._context.state(0))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
