"""The numpy engine: a Llama whose logits are the same bits in every batch.

A session's results depend on its tokens and their positions only: not on which sessions share the step, not on their
order, not on how the prompt was cut. Three rules make that true.

* Linear maps run in tiles of 8 decode rows and blocks of 16 prompt rows (`exact_linear`). Everything else that spans a
  batch works element by element or sums along one row.
* Attention runs per session. A decode row's products have shapes given by its position alone.
* A prompt runs in blocks on the absolute grid: block j holds positions 16j .. 16j + 15 and attends to 16j + 16 keys,
  whatever chunk it came in. A block cut short by the prompt's end is padded; one cut to a single token is computed as a
  decode row, because a chunk of one token cannot be told from one.

A generated token's KV is that of a decode row; prefilling it instead gives slightly other bits. So a takeover prefills
the original prompt and replays logged tokens as decode rows, and `recompute_exact` is False.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.ports import CacheMiss, Capability, Logits, Member, MemberError, StepLogits, StepResult
from tasks.vocabulary import Vocabulary
from workers.engines.exact_linear import BLOCK, TILE, Crew, ExactLinear, Measurement, measure, padded
from workers.engines.llama_weights import Floats, LayerWeights, LlamaConfig, LlamaWeights
from workers.engines.session_kv import SessionKV

PREFILL_GRID = BLOCK
#: Raised whenever a change of code changes bits.
NUMERIC_POLICY = "float32;panels;tile8;block16;ones-column-softmax;1"

_MAX_SESSIONS = 256

#: What is added to a block's scores of its own keys: a query does not see later ones. (16, 16)
_CAUSAL = np.triu(np.full((BLOCK, BLOCK), -np.inf, np.float32), 1)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: ExactLinear
    output: ExactLinear
    gate_up: ExactLinear
    down: ExactLinear

    @classmethod
    def of(cls, weights: LayerWeights, crew: Crew, by_shape: Mapping[tuple[int, ...], Measurement]) -> _Layer:
        maps = (weights.qkv, weights.output, weights.gate_up, weights.down)
        return cls(*(ExactLinear(weight, crew, wide=by_shape[weight.shape].wide) for weight in maps))


@dataclass(slots=True)
class _Run:
    """Tokens (n,) of one session for positions [start, start + n), at batch rows [row, row + n). A decode run has one
    token; a prompt run starts on the grid and owns its last block's padding."""

    kv: SessionKV
    tokens: npt.NDArray[np.int64]
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
    def of(cls, kv: SessionKV, tokens: npt.NDArray[np.int64], start: int) -> _Part:
        end = start + len(tokens)
        cut = end - 1 if end > 1 and (end % PREFILL_GRID == 1 or len(tokens) == 1) else end
        prompt = _Run(kv, tokens[: cut - start], start) if cut > start else None
        return cls(prompt, _Run(kv, tokens[cut - start :], cut) if cut < end else None)

    @property
    def last(self) -> _Run:
        run = self.token or self.prompt
        assert run is not None
        return run


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where everything is in a step's rows: decode rows, padded to tiles, then prompt blocks."""

    decodes: list[_Run]
    prompts: list[_Run]
    decode_rows: int
    rows: int

    @classmethod
    def of(cls, parts: Iterable[_Part]) -> _Plan:
        """Gives every run its rows."""
        runs = [(part.prompt, part.token) for part in parts]
        decodes = [token for _, token in runs if token]
        prompts = [prompt for prompt, _ in runs if prompt]
        for row, run in enumerate(decodes):
            run.row = row
        decode_rows = rows = padded(len(decodes), TILE)
        for run in prompts:
            run.row = rows
            rows += padded(len(run.tokens), BLOCK)
        return cls(decodes, prompts, decode_rows, rows)

    def tokens_and_positions(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(R,) each; padding is token 0 at position 0."""
        tokens, positions = np.zeros((2, self.rows), np.int64)
        for run in (*self.decodes, *self.prompts):
            tokens[run.row : run.row + len(run.tokens)] = run.tokens
            positions[run.row : run.row + len(run.tokens)] = np.arange(run.start, run.end)
        return tokens, positions


class NumpyLlama:
    """`tasks.ports.Engine` over numpy, its linear maps shared out among `threads` threads. Not for several callers at
    once."""

    def __init__(self, weights: LlamaWeights, vocabulary: Vocabulary, *, threads: int = 1) -> None:
        self._config = config = weights.config
        self._vocabulary = vocabulary
        self._weights: LlamaWeights | None = weights
        self._crew = Crew(threads)
        by_shape, of_head = _measured(weights, self._crew)
        self._layers = tuple(_Layer.of(layer, self._crew, by_shape) for layer in weights.layers)
        self._head: ExactLinear | None = ExactLinear(weights.head, self._crew)
        measurements = (*by_shape.values(), of_head)
        self._invariant = all(measurement.rows_independent for measurement in measurements)
        self._fingerprint = _fingerprint(weights, vocabulary, measurements)
        self._cos, self._sin = _rotations(config)
        self._sessions: dict[tuple[str, int], SessionKV] = {}

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def context_length(self) -> int:
        return self._config.context_length

    @property
    def bytes_per_token(self) -> int:
        config = self._config
        return config.layers * config.kv_heads * (2 * config.head_dim + 1) * 4

    @property
    def prefill_grid(self) -> int:
        return PREFILL_GRID

    def fingerprint(self) -> str:
        return self._fingerprint

    def capability(self) -> Capability:
        return Capability(
            max_sessions=_MAX_SESSIONS,
            max_positions=self.context_length,
            batch_invariant=self._invariant,
            recompute_exact=False,
            snapshot=True,
            prefix_share=True,
            logprobs=True,
            seed=True,
        )

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        """See `tasks.ports.Engine.step`. Rows of logits are the caller's own."""
        results: list[StepResult | None] = [None] * len(batch)
        parts: dict[int, _Part] = {}
        seen: set[tuple[str, int]] = set()
        for index, member in enumerate(batch):
            accepted = self._accept(member, seen)
            if isinstance(accepted, _Part):
                parts[index] = accepted
            else:
                results[index] = accepted
        if parts:
            self._run(batch, parts, results)
        return [result for result in results if result is not None]

    def release(self, session: str, epoch: int) -> None:
        self._sessions.pop((session, epoch), None)

    def share_prefix(self, source: tuple[str, int], target: tuple[str, int], positions: int) -> bool:
        """See `tasks.ports.Engine.share_prefix`; copies. Only whole blocks of the grid can be shared, and the result is
        exact when the source prefilled them."""
        held = self._sessions.get(source)
        if held is None or source == target or positions <= 0 or positions % PREFILL_GRID or positions > held.length:
            return False
        self._sessions[target] = held.prefix(self._config, positions)
        return True

    def snapshot(self, session: str, epoch: int) -> bytes | None:
        kv = self._sessions.get((session, epoch))
        return None if kv is None or kv.length == 0 else kv.to_bytes(self._fingerprint)

    def restore(self, session: str, epoch: int, blob: bytes) -> bool:
        kv = SessionKV.from_bytes(self._config, self._fingerprint, blob)
        if kv is None or self._weights is None:
            return False
        self._sessions[session, epoch] = kv
        return True

    def close(self) -> None:
        """Free weights and sessions; members of later steps are errors."""
        self._crew.close()
        self._sessions.clear()
        self._weights, self._layers, self._head = None, (), None

    def _accept(self, member: Member, seen: set[tuple[str, int]]) -> _Part | StepResult:
        """Check one member and make room for its KV."""
        if self._weights is None:
            return MemberError("the engine is closed")
        key = (member.session, member.epoch)
        if key in seen:
            return MemberError("the session is in this batch already")
        seen.add(key)
        tokens = np.array(member.tokens, np.int64)  # (T,)
        problem = self._problem(tokens, member.start)
        if problem:
            return MemberError(problem)
        end = member.start + len(tokens)
        try:
            kv = SessionKV(self._config, positions=end) if member.start == 0 else self._sessions.get(key)
            if kv is None or kv.length != member.start:
                return CacheMiss()
            kv.reserve(end)
        except MemoryError:
            return MemberError("no memory for the session's KV")
        self._sessions[key] = kv
        return _Part.of(kv, tokens, member.start)

    def _problem(self, tokens: npt.NDArray[np.int64], start: int) -> str | None:
        """Why these tokens cannot run, without naming any of them."""
        if tokens.ndim != 1 or len(tokens) == 0:
            return "a member needs a non-empty, one-dimensional array of tokens"
        if tokens.min() < 0 or tokens.max() >= self._config.vocabulary_size:
            return f"a token id is outside the vocabulary, 0 to {self._config.vocabulary_size - 1}"
        if start < 0 or start + len(tokens) > self.context_length:
            return f"position {start + len(tokens) - 1} is outside the context of {self.context_length} positions"
        if len(tokens) > 1 and start % PREFILL_GRID:
            return f"a prefill chunk must start at a multiple of {PREFILL_GRID}, not at {start}"
        return None

    def _run(self, batch: Sequence[Member], parts: dict[int, _Part], results: list[StepResult | None]) -> None:
        plan = _Plan.of(parts.values())
        wanted = [index for index in parts if batch[index].wants_logits]
        with np.errstate(over="ignore", under="ignore"):
            x = self._forward(plan)
            logits = self._logits(x, [parts[index].last.last_row for index in wanted])
        row_of = dict(zip(wanted, logits, strict=True))
        for index, part in parts.items():
            part.last.kv.length = part.last.end
            results[index] = StepLogits(row_of.get(index), part.last.end)

    def _forward(self, plan: _Plan) -> Floats:
        """The last layer's output (R, width); the runs' keys and values are written."""
        config = self._config
        tokens, positions = plan.tokens_and_positions()
        rotation = self._cos[positions][:, None], self._sin[positions][:, None]  # (R, 1, head_dim / 2) each
        x = self._embed(tokens)  # (R, width)
        attended = np.zeros((plan.rows, config.heads, config.head_dim), np.float32)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normalised(x), decode_rows=plan.decode_rows)
            heads = qkv.reshape(plan.rows, -1, config.head_dim)  # (R, heads + 2 * kv_heads, head_dim)
            rotated = _rotated(heads[:, : config.heads + config.kv_heads], *rotation)
            _store(index, plan, rotated[:, config.heads :], heads[:, config.heads + config.kv_heads :])
            self._attend(index, plan, rotated[:, : config.heads], attended)
            x += layer.output(attended.reshape(plan.rows, -1), decode_rows=plan.decode_rows)
            gate_up = layer.gate_up(self._normalised(x), decode_rows=plan.decode_rows)
            x += layer.down(_gated(gate_up), decode_rows=plan.decode_rows)
        return x

    def _embed(self, tokens: npt.NDArray[np.int64]) -> Floats:
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

    def _attend(self, layer: int, plan: _Plan, queries: Floats, attended: Floats) -> None:
        """queries (R, heads, head_dim) -> attended, of the same shape."""
        config = self._config
        grouped = queries.reshape(plan.rows, config.kv_heads, -1, config.head_dim)  # G = heads / kv_heads
        mixed = attended.reshape(grouped.shape)
        for run in plan.decodes:
            mixed[run.row] = _attended_token(grouped[run.row], run.kv.keys[layer], run.kv.values[layer], run.start)
        for run in plan.prompts:
            for offset in range(0, len(run.tokens), BLOCK):
                rows = slice(run.row + offset, run.row + offset + BLOCK)
                keys, values = run.kv.keys[layer], run.kv.values[layer]
                mixed[rows] = _attended_block(grouped[rows], keys, values, run.start + offset)

    def _logits(self, x: Floats, last_rows: Sequence[int]) -> list[Logits]:
        weights, head = self._weights, self._head
        assert weights is not None and head is not None
        if not last_rows:
            return []
        chosen = np.zeros((padded(len(last_rows), TILE), self._config.width), np.float32)
        chosen[: len(last_rows)] = x[list(last_rows)]
        logits = head(self._normalised(chosen) * weights.final_norm, decode_rows=len(chosen))  # (R, V)
        return list(logits[: len(last_rows)])


def _store(layer: int, plan: _Plan, keys: Floats, values: Floats) -> None:
    """Keys and values (R, kv_heads, head_dim) of the batch go to each run's KV."""
    for run in (*plan.decodes, *plan.prompts):
        rows = slice(run.row, run.row + len(run.tokens))
        run.kv.keys[layer, :, run.start : run.end] = keys[rows].transpose(1, 0, 2)
        run.kv.values[layer, :, run.start : run.end, :-1] = values[rows].transpose(1, 0, 2)


def _attended_token(queries: Floats, keys: Floats, values: Floats, position: int) -> Floats:
    """One token's queries (kv_heads, G, head_dim) over the keys (kv_heads, capacity, head_dim) up to its position."""
    scores = queries @ keys[:, : position + 1].transpose(0, 2, 1)  # (kv_heads, G, T)
    return _mixed(scores, values[:, : position + 1])


def _attended_block(queries: Floats, keys: Floats, values: Floats, start: int) -> Floats:
    """A block's queries (16, kv_heads, G, head_dim) from position `start` on, each over the keys up to its own."""
    stop = start + BLOCK
    by_head = queries.transpose(1, 2, 0, 3)  # (kv_heads, G, 16, head_dim)
    flat = by_head.reshape(len(by_head), -1, by_head.shape[-1])
    scores = flat @ keys[:, :stop].transpose(0, 2, 1)  # (kv_heads, G * 16, T)
    scores.reshape(*by_head.shape[:-1], stop)[..., start:] += _CAUSAL
    return _mixed(scores, values[:, :stop]).reshape(by_head.shape).transpose(2, 0, 1, 3)


def _mixed(scores: Floats, values: Floats) -> Floats:
    """softmax(scores) @ values: (..., Q, T), (..., T, head_dim + 1) -> (..., Q, head_dim). `scores` is overwritten.

    The last column of values is ones, so the products hold the softmax's denominator."""
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    products = scores @ values
    mixed: Floats = products[..., :-1] / products[..., -1:]
    return mixed


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


def _measured(weights: LlamaWeights, crew: Crew) -> tuple[dict[tuple[int, ...], Measurement], Measurement]:
    """What this machine does with each shape of the layers' maps, and with the head."""
    by_shape: dict[tuple[int, ...], Measurement] = {}
    for layer in weights.layers:
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
            if weight.shape not in by_shape:
                by_shape[weight.shape] = measure(weight, crew)
    # The head sees last rows only, in tiles: no wide products to measure.
    return by_shape, measure(weights.head, crew, limit=0)


def _fingerprint(weights: LlamaWeights, vocabulary: Vocabulary, measurements: Iterable[Measurement]) -> str:
    """SHA-256 (hex) of everything that decides an engine's bits. The kernels are known by the bits they made."""
    build = np.show_config(mode="dicts")
    document = {
        "weights": weights.digest,
        "config": weights.config.describe(),
        "vocabulary": vocabulary.fingerprint(),
        "policy": NUMERIC_POLICY,
        "numpy": np.__version__,
        "blas": build["Build Dependencies"]["blas"].get("version"),
        "simd": build["SIMD Extensions"],
        "kernels": [measurement.bits for measurement in measurements],
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
