"""The numpy engine: a Llama whose logits are the same bits in every batch.

A session's results depend on its tokens and their positions only: not on which sessions share the step, not on their
order, not on how the prompt was cut. Three rules make that true.

* Linear maps run in tiles of decode rows and blocks of 16 prompt rows (`exact_linear`). Everything else that spans a
  batch works element by element or sums along one row.
* Attention multiplies with whole pages of KV, which all have the same shape (`paged_attention`).
* A prompt runs in blocks on the absolute grid: block j holds positions 16j .. 16j + 15, whatever chunk it came in. A
  block cut short by the prompt's end is padded; one cut to a single token is computed as a decode row, because a chunk
  of one token cannot be told from one.

Keys and values live in pages that sessions with the same beginning share (`paged_kv`); what one begins with has the
bits that computing it would give.

A generated token's KV is that of a decode row; prefilling it instead gives slightly other bits. So a takeover prefills
the original prompt and replays logged tokens as decode rows, and `recompute_exact` is False.

With `exact=False` linear maps are single products of all rows instead, and none of this is promised.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasks.ports import (
    Capability,
    Kept,
    KVRefused,
    KVUsage,
    Logits,
    Member,
    MemberError,
    StepLogits,
    StepResult,
    TokenIds,
)
from tasks.vocabulary import Vocabulary
from workers.engines.arithmetic import Arithmetic
from workers.engines.exact_linear import BLOCK, Crew, Linear, Measurement, padded
from workers.engines.llama_weights import Floats, LayerWeights, LlamaConfig, LlamaWeights
from workers.engines.members import Accepted, Key, Limits, accept
from workers.engines.paged_attention import (
    KV_PAGE,
    BlockSpan,
    Indices,
    TokenSpans,
    attended_blocks,
    attended_tokens,
    block_spans,
    measure_attention,
)
from workers.engines.paged_kv import PagedKV, PagedSession, position_bytes

PREFILL_GRID = BLOCK

_MAX_SESSIONS = 256

#: Where an engine is made without settings.
_KV_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, weights: LayerWeights, linear: Callable[[Floats], Linear]) -> _Layer:
        return cls(*map(linear, (weights.qkv, weights.output, weights.gate_up, weights.down)))


@dataclass(slots=True)
class _Run:
    """Tokens (n,) of one session for positions [start, start + n), at batch rows [row, row + n). A decode run has one
    token; a prompt run starts on the grid and owns its last block's padding."""

    session: PagedSession
    tokens: Indices
    start: int
    row: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def last_row(self) -> int:
        return self.row + len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class _Part:
    """A member that passed its checks: a prompt run, a decode run, or both in this order."""

    prompt: _Run | None
    token: _Run | None

    @classmethod
    def of(cls, session: PagedSession, tokens: Indices, start: int) -> _Part:
        end = start + len(tokens)
        cut = end - 1 if end > 1 and (end % PREFILL_GRID == 1 or len(tokens) == 1) else end
        prompt = _Run(session, tokens[: cut - start], start) if cut > start else None
        return cls(prompt, _Run(session, tokens[cut - start :], cut) if cut < end else None)

    @property
    def runs(self) -> list[_Run]:
        return [run for run in (self.prompt, self.token) if run]

    @property
    def last(self) -> _Run:
        return self.runs[-1]

    @property
    def prefilled(self) -> int:
        """The session's first positions that were computed as blocks of a prompt, now or before."""
        before = self.last.session.prefilled
        return self.prompt.end if self.prompt and self.prompt.start == before else before


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where everything is in a step's rows: decode rows with their padding, then prompt blocks. `tokens`, `blocks`: the
    pages that they attend to."""

    decodes: list[_Run]
    prompts: list[_Run]
    decode_rows: int
    rows: int
    tokens: TokenSpans | None
    blocks: list[BlockSpan]

    @classmethod
    def of(cls, parts: Iterable[_Part], config: LlamaConfig, padding: Callable[[int], int]) -> _Plan:
        """Gives every run its rows."""
        runs = [(part.prompt, part.token) for part in parts]
        decodes = [token for _, token in runs if token]
        prompts = [prompt for prompt, _ in runs if prompt]
        for row, run in enumerate(decodes):
            run.row = row
        decode_rows = rows = padding(len(decodes))
        blocks: list[BlockSpan] = []
        for run in prompts:
            run.row = rows
            rows += padded(len(run.tokens), BLOCK)
            blocks += block_spans(run.row, run.start, padded(run.end, BLOCK), run.session.runs, config)
        tokens = TokenSpans.of([(run.session.table, run.start) for run in decodes], config) if decodes else None
        return cls(decodes, prompts, decode_rows, rows, tokens, blocks)

    def tokens_and_positions(self) -> tuple[Indices, Indices]:
        """(R,) each; padding is token 0 at position 0."""
        tokens, positions = np.zeros((2, self.rows), np.int64)
        for run in (*self.decodes, *self.prompts):
            tokens[run.row : run.row + len(run.tokens)] = run.tokens
            positions[run.row : run.row + len(run.tokens)] = np.arange(run.start, run.end)
        return tokens, positions

    def stored(self) -> list[tuple[slice, Indices, Indices]]:
        """Rows without padding, and where their keys and values go: page and place in it, (n,) each."""
        stored = [(slice(run.row, run.last_row + 1), *run.session.places(run.start, run.end)) for run in self.prompts]
        if self.decodes:
            pages = [run.session.table[run.start // KV_PAGE] for run in self.decodes]
            places = [run.start % KV_PAGE for run in self.decodes]
            stored.append((slice(len(self.decodes)), np.array(pages), np.array(places)))
        return stored


class NumpyLlama:
    """`tasks.ports.Engine` over numpy, its linear maps shared out among `threads` threads, the KV of all sessions in
    `kv_bytes`. Not for several callers at once."""

    def __init__(
        self,
        weights: LlamaWeights,
        vocabulary: Vocabulary,
        *,
        threads: int = 1,
        kv_bytes: int = _KV_BYTES,
        exact: bool = True,
    ) -> None:
        self._config = config = weights.config
        self._vocabulary = vocabulary
        self._weights: LlamaWeights | None = weights
        self._crew = Crew(threads)
        self._kv = PagedKV(config, kv_bytes)
        arithmetic = Arithmetic.exact(weights, self._crew) if exact else Arithmetic.plain(self._crew)
        attention = measure_attention(config)
        self._layers = tuple(_Layer.of(layer, arithmetic.linear) for layer in weights.layers)
        self._head: Linear | None = arithmetic.linear(weights.head)
        self._padding = arithmetic.padding
        self._invariant = arithmetic.invariant and attention.rows_independent
        self._limits = Limits(config.vocabulary_size, config.context_length, PREFILL_GRID)
        self._fingerprint = _fingerprint(weights, vocabulary, arithmetic.policy, (*arithmetic.kernels, attention))
        self._cos, self._sin = _rotations(config)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def context_length(self) -> int:
        return self._config.context_length

    @property
    def bytes_per_token(self) -> int:
        return position_bytes(self._config)

    @property
    def prefill_grid(self) -> int:
        return PREFILL_GRID

    def fingerprint(self) -> str:
        return self._fingerprint

    def capability(self) -> Capability:
        return Capability(
            max_sessions=_MAX_SESSIONS,
            max_positions=min(self.context_length, self._kv.positions),
            batch_invariant=self._invariant,
            recompute_exact=False,
            snapshot=True,
            prefix_share=True,
            logprobs=True,
            seed=True,
            offload=True,
        )

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        """See `tasks.ports.Engine.step`. Rows of logits are the caller's own."""
        if self._weights is None:
            return [MemberError("the engine is closed") for _ in batch]
        results: list[StepResult | None] = [None] * len(batch)
        parts: dict[int, _Part] = {}
        seen: set[Key] = set()
        for index, member in enumerate(batch):
            accepted = accept(member, seen, self._kv.get, self._limits)
            if isinstance(accepted, Accepted):
                parts[index] = _Part.of(accepted.session, accepted.tokens, member.start)
            else:
                results[index] = accepted
        if parts:
            self._run(batch, parts, results)
        return [result for result in results if result is not None]

    def begin(self, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = "") -> int | None:
        """See `tasks.ports.Engine.begin`. What it begins with has the bits that computing it would give."""
        begun = None if self._weights is None else self._kv.begin((session, epoch), prompt, positions, scope)
        return None if begun is None else begun.length

    def extend(self, session: str, epoch: int, positions: int) -> bool:
        return self._kv.extend((session, epoch), positions)

    def resident(self, prompt: TokenIds, scope: str = "") -> int:
        return self._kv.resident(prompt, scope)

    def release(
        self,
        session: str,
        epoch: int,
        *,
        tokens: TokenIds | None = None,
        holder: str = "",
    ) -> None:
        self._kv.release((session, epoch), tokens, holder)

    def unpin(self, holder: str) -> None:
        self._kv.unpin(holder)

    def snapshot(self, session: str, epoch: int) -> bytes | None:
        return self._kv.to_bytes((session, epoch), self._fingerprint)

    def restore(
        self, session: str, epoch: int, blob: bytes, prompt: TokenIds, positions: int, scope: str = ""
    ) -> bool | None:
        """See `tasks.ports.Engine.restore`. Raises ValueError for a session that has begun."""
        if self._weights is None:
            return False
        return self._kv.from_bytes((session, epoch), self._fingerprint, blob, prompt, positions, scope)

    def kept_for(self, holder: str) -> int:
        return self._kv.kept_for(holder)

    def export(self, holder: str) -> Kept | None:
        return self._kv.export(holder, self._fingerprint)

    def begin_from(
        self, kept: Kept, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = ""
    ) -> int | None:
        if self._weights is None:
            raise KVRefused("the engine is closed")
        begun = self._kv.begin_from(kept, (session, epoch), self._fingerprint, prompt, positions, scope)
        return None if begun is None else begun.length

    def held_by(self, owners: Mapping[str, Sequence[Key]]) -> dict[str, int]:
        return self._kv.held_by(owners)

    def sole(self, sessions: Sequence[Key]) -> int:
        return self._kv.sole(sessions)

    def kv_usage(self) -> KVUsage:
        return self._kv.usage()

    def check_integrity(self) -> None:
        self._kv.check_integrity()

    def close(self) -> None:
        """Free weights and sessions; members of later steps are errors."""
        self._crew.close()
        self._kv.clear()
        self._weights, self._layers, self._head = None, (), None

    def _run(self, batch: Sequence[Member], parts: dict[int, _Part], results: list[StepResult | None]) -> None:
        plan = _Plan.of(parts.values(), self._config, self._padding)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            x = self._forward(plan)
            sick = set() if np.isfinite(x).all() else self._sick(parts, x)
            wanted = [index for index in parts if batch[index].wants_logits and index not in sick]
            logits = self._logits(x, [parts[index].last.last_row for index in wanted])
        row_of = dict(zip(wanted, logits, strict=True))
        for index, part in parts.items():
            if index in sick:
                self._kv.wipe(part.last.session, part.last.end)
                results[index] = MemberError("the model's numbers overflowed")
            else:
                self._kv.advance(part.last.session, part.last.end, prefilled=part.prefilled)
                results[index] = StepLogits(row_of.get(index), part.last.end)

    def _sick(self, parts: Mapping[int, _Part], x: Floats) -> set[int]:
        """Members with rows that are no numbers. They have spoilt nobody else's: rows do not touch."""
        return {
            index
            for index, part in parts.items()
            if not all(np.isfinite(x[run.row : run.last_row + 1]).all() for run in part.runs)
        }

    def _forward(self, plan: _Plan) -> Floats:
        """The last layer's output (R, width); the runs' keys and values are written."""
        config = self._config
        tokens, positions = plan.tokens_and_positions()
        rotation = self._cos[positions][:, None], self._sin[positions][:, None]  # (R, 1, head_dim / 2) each
        stored = plan.stored()
        for _, pages, places in stored:
            self._kv.values[:, pages, :, places, -1] = 1
        x = self._embed(tokens)  # (R, width)
        attended = np.zeros((plan.rows, config.heads, config.head_dim), np.float32)
        for index, layer in enumerate(self._layers):
            keys, values = self._kv.keys[index], self._kv.values[index]
            qkv = layer.qkv(self._normalised(x), decode_rows=plan.decode_rows)
            heads = qkv.reshape(plan.rows, -1, config.head_dim)  # (R, heads + 2 * kv_heads, head_dim)
            rotated = _rotated(heads[:, : config.heads + config.kv_heads], *rotation)
            for rows, pages, places in stored:
                keys[pages, :, :, places] = rotated[rows, config.heads :]
                values[pages, :, places, :-1] = heads[rows, config.heads + config.kv_heads :]
            _attend(plan, rotated[:, : config.heads], keys, values, attended)
            x += layer.output(attended.reshape(plan.rows, -1), decode_rows=plan.decode_rows)
            gate_up = layer.gate_up(self._normalised(x), decode_rows=plan.decode_rows)
            x += layer.down(_gated(gate_up), decode_rows=plan.decode_rows)
        return x

    def _embed(self, tokens: Indices) -> Floats:
        """(R,) -> (R, width)."""
        weights = self._weights
        assert weights is not None
        if weights.embedding is not None:
            return weights.embedding[tokens]
        panel, column = np.divmod(tokens, weights.head.shape[2])
        return weights.head[panel, :, column]

    def _normalised(self, x: Floats) -> Floats:
        """x / rms(x) by rows (Zhang & Sennrich 2019); the norm's weights are part of the map that follows."""
        sums: Floats = np.add.reduce(x * x, axis=-1, keepdims=True)
        sums *= np.float32(1 / self._config.width)
        sums += np.float32(self._config.norm_epsilon)
        np.sqrt(sums, out=sums)
        normalised: Floats = x / sums
        return normalised

    def _logits(self, x: Floats, last_rows: Sequence[int]) -> list[Logits]:
        weights, head = self._weights, self._head
        assert weights is not None and head is not None
        if not last_rows:
            return []
        chosen = np.zeros((self._padding(len(last_rows)), self._config.width), np.float32)
        chosen[: len(last_rows)] = x[list(last_rows)]
        logits = head(self._normalised(chosen) * weights.final_norm, decode_rows=len(chosen))  # (R, V)
        return list(logits[: len(last_rows)])


def _attend(plan: _Plan, queries: Floats, keys: Floats, values: Floats, attended: Floats) -> None:
    """queries (R, heads, head_dim) over a layer's pages -> attended, of the same shape."""
    grouped = queries.reshape(plan.rows, keys.shape[1], -1, queries.shape[-1])  # (R, kv_heads, G, head_dim)
    mixed = attended.reshape(grouped.shape)
    if plan.tokens is not None:
        rows = slice(len(plan.decodes))
        mixed[rows] = attended_tokens(grouped[rows], keys, values, plan.tokens)
    for span in plan.blocks:
        mixed[span.rows] = attended_blocks(grouped[span.rows], keys, values, span)


def _gated(gate_up: Floats) -> Floats:
    """silu(gate) * up (Shazeer 2020): (R, 2 * F) -> (R, F)."""
    width = gate_up.shape[1] // 2
    gate = np.ascontiguousarray(gate_up[:, :width])
    gated = np.negative(gate)
    np.exp(gated, out=gated)
    gated += np.float32(1)
    np.divide(gate, gated, out=gated)
    gated *= gate_up[:, width:]
    return gated


def _rotated(heads: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotary embedding (Su et al. 2021) of (R, H, head_dim), dimension i paired with i + head_dim / 2."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    rotated = np.empty(heads.shape, np.float32)
    np.subtract(first * cos, second * sin, out=rotated[..., :half])
    np.add(second * cos, first * sin, out=rotated[..., half:])
    return rotated


def _rotations(config: LlamaConfig) -> tuple[Floats, Floats]:
    """Cosines and sines (context_length, head_dim / 2) of position * base^(-2i / head_dim)."""
    frequencies = config.rope_base ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    angles = np.arange(config.context_length, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _fingerprint(
    weights: LlamaWeights, vocabulary: Vocabulary, policy: str, measurements: Iterable[Measurement]
) -> str:
    """SHA-256 (hex) of everything that decides an engine's bits. The kernels are known by the bits they made."""
    build = np.show_config(mode="dicts")
    document = {
        "weights": weights.digest,
        "config": weights.config.describe(),
        "vocabulary": vocabulary.fingerprint(),
        "policy": policy,
        "numpy": np.__version__,
        "blas": build["Build Dependencies"]["blas"].get("version"),
        "simd": build["SIMD Extensions"],
        "kernels": [measurement.bits for measurement in measurements],
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
