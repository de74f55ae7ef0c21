"""Windows of samples of a rank, and what they say of it.

| window | one sample per | says |
|---|---|---|
| requests | request that succeeded | how prompts grow, how long requests take, how many rounds a Program goes on |
| continuity | return of a Program to the rank it left | how long tools run, what losing its KV would have cost |
| pauses | pause by TTL | rounds of the segment it ended |

Each holds the last `stats_window_size` samples. A sample is packed into a few bytes, so that a window is a list of the
state server's.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pool.rules.programs.facts import Means

#: Part of the previous prompt that must still be cached for a round to go on where the last one ended.
CONTINUITY_SHARE = 0.9
#: "Not known", where a count is packed.
_UNKNOWN = 2**32 - 1
_MOST = _UNKNOWN - 1


def is_continuous(cached_tokens: int, previous_prompt_tokens: int) -> bool:
    """Whether a round found the KV of the one before it again."""
    return cached_tokens >= CONTINUITY_SHARE * previous_prompt_tokens


def counts_as_round(cached_tokens: int | None, previous_prompt_tokens: int | None) -> bool:
    """Whether a round prolongs the segment: unless it is known that the KV of the one before it was lost. An engine
    that does not say what was cached must not keep its Programs from ever yielding."""
    return (
        cached_tokens is None or previous_prompt_tokens is None or is_continuous(cached_tokens, previous_prompt_tokens)
    )


def growth_tokens(prompt_tokens: int, previous_prompt_tokens: int | None) -> int | None:
    """How much longer the prompt is than the Program's previous one. None where that says nothing: there was none, the
    history was compacted, or it is another conversation (longer by as much as there was)."""
    growth = prompt_tokens - (previous_prompt_tokens or 0)
    return growth if previous_prompt_tokens and 0 < growth < previous_prompt_tokens else None


# --- samples


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One request that succeeded. None: not known. `end_to_end_s`: arrival to end; `queue_s`: the part of it before its
    dispatch; `rounds`: rounds of its Program since that was last paused by TTL, this one included; `finish_ms`: its end
    by the state server's clock."""

    _PACKED: ClassVar[struct.Struct] = struct.Struct("<IIIIfffHQ")

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    growth_tokens: int | None
    end_to_end_s: float
    decode_s: float | None
    queue_s: float
    rounds: int
    finish_ms: int

    @property
    def uncached_tokens(self) -> int | None:
        """Tokens of the prompt that had to be computed."""
        return None if self.cached_tokens is None else max(self.prompt_tokens - self.cached_tokens, 0)

    def packed(self) -> bytes:
        """38 bytes. Counts of more than 32 bits are taken for the most that fits, rounds of more than 16 likewise."""
        return self._PACKED.pack(
            _count(self.prompt_tokens),
            _count(self.completion_tokens),
            _count(self.cached_tokens),
            _count(self.growth_tokens),
            self.end_to_end_s,
            math.nan if self.decode_s is None else self.decode_s,
            self.queue_s,
            min(self.rounds, 2**16 - 1),
            self.finish_ms,
        )

    @classmethod
    def unpacked(cls, packed: bytes) -> RequestSample:
        """The inverse of `packed`, with times in single precision."""
        prompt, completion, cached, growth, end_to_end, decode, queue, rounds, finish = cls._PACKED.unpack(packed)
        return cls(
            prompt,
            completion,
            None if cached == _UNKNOWN else cached,
            None if growth == _UNKNOWN else growth,
            end_to_end,
            None if math.isnan(decode) else decode,
            queue,
            rounds,
            finish,
        )


@dataclass(frozen=True, slots=True)
class ContinuitySample:
    """One return of a Program. `interval_s`: from the end of its last request to this one's arrival; `miss_impact_s`:
    what losing the KV of that last request would have cost."""

    _PACKED: ClassVar[struct.Struct] = struct.Struct("<ff")

    interval_s: float
    miss_impact_s: float

    def packed(self) -> bytes:
        """8 bytes."""
        return self._PACKED.pack(self.interval_s, self.miss_impact_s)

    @classmethod
    def unpacked(cls, packed: bytes) -> ContinuitySample:
        """The inverse of `packed`, in single precision."""
        return cls(*cls._PACKED.unpack(packed))


@dataclass(frozen=True, slots=True)
class PauseSample:
    """One pause by TTL. `segment_rounds`: rounds of the segment since its last pause by TTL."""

    _PACKED: ClassVar[struct.Struct] = struct.Struct("<H")

    segment_rounds: int

    def packed(self) -> bytes:
        """2 bytes; more than 65,535 rounds are taken for so many."""
        return self._PACKED.pack(min(self.segment_rounds, 2**16 - 1))

    @classmethod
    def unpacked(cls, packed: bytes) -> PauseSample:
        """The inverse of `packed`."""
        return cls(*cls._PACKED.unpack(packed))


def _count(value: int | None) -> int:
    return _UNKNOWN if value is None else min(value, _MOST)


# --- what windows say


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of one rank, the oldest samples first."""

    requests: Sequence[RequestSample] = ()
    continuity: Sequence[ContinuitySample] = ()
    pauses: Sequence[PauseSample] = ()

    def last(self, size: int) -> Windows:
        """The same with at most so many samples each, the newest: a window may have been longer before the setting
        changed."""
        return Windows(self.requests[-size:], self.continuity[-size:], self.pauses[-size:])


def means_of(windows: Windows, window_size: int) -> Means:
    """What one rank's windows say."""
    return pooled((windows,), window_size)


def pooled(ranks: Sequence[Windows], window_size: int) -> Means:
    """What the windows of several ranks of a model say together, of any one of them: an idle rank never fills windows
    of its own. They are full where all samples together fill one; throughput is the mean of the ranks that have one.
    Of each rank its last `window_size` samples count."""
    recent = [windows.last(window_size) for windows in ranks]
    requests = [sample for windows in recent for sample in windows.requests]
    continuity = [sample for windows in recent for sample in windows.continuity]
    return Means(
        full=len(requests) >= window_size,
        continuity_full=len(continuity) >= window_size,
        growth_tokens=_mean(sample.growth_tokens for sample in requests),
        prompt_tokens=_mean(sample.prompt_tokens for sample in requests),
        output_tokens=_mean(sample.completion_tokens for sample in requests),
        uncached_tokens=_mean(sample.uncached_tokens for sample in requests),
        end_to_end_s=_mean(sample.end_to_end_s for sample in requests),
        decode_s=_mean(sample.decode_s for sample in requests),
        miss_impact_s=_mean(sample.miss_impact_s for sample in continuity),
        segment_rounds=_mean(sample.rounds for sample in requests),
        throughput_per_s=_mean(_throughput(windows.requests) for windows in recent),
        intervals_s=tuple(sample.interval_s for sample in continuity if sample.interval_s > 0),
        pause_rounds=_mean(sample.segment_rounds for windows in recent for sample in windows.pauses),
    )


def target_rounds(means: Means, max_segment_rounds: int) -> int:
    """Rounds of growth that a place is reserved for; 0 while the request window is not full.

    `segment_rounds` is how far segments have got when they are looked at, which is halfway on average, hence the 2.
    """
    if not means.full or means.segment_rounds is None:
        return 0
    return min(max(math.ceil(2 * means.segment_rounds), 1), max_segment_rounds)


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _throughput(requests: Sequence[RequestSample]) -> float | None:
    """Requests per second of the time in which at least one was in the engine: from its dispatch to its end."""
    busy_ms, last_ms = 0.0, -math.inf
    spans = sorted(
        (sample.finish_ms - 1000 * (sample.end_to_end_s - sample.queue_s), sample.finish_ms) for sample in requests
    )
    for begin_ms, end_ms in spans:
        busy_ms += max(end_ms - max(begin_ms, last_ms), 0)
        last_ms = max(last_ms, end_ms)
    return len(requests) / busy_ms * 1000 if busy_ms > 0 else None
