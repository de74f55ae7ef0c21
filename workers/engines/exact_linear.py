"""Matrix products whose rows do not depend on what else is in the batch, bit for bit.

BLAS picks its kernel by shape, and kernels differ in the last bits: the same row gives other bits in a batch of 1 than
in a batch of 5. So rows come in tiles, and every product has one and the same shape: 8 rows for decode rows, 16 for a
block of a prompt. A row's bits then depend on the row (and, in a block, on its place there) alone; `measure` checks on
this machine's kernels that a decode row's place does not matter either.

Few rows in a tile of 8 cost as much as 8. Many kernels give the rows of a shorter tile the same bits, down to two rows
(one alone is another kernel's, a product with a vector). Which do is measured, too, and only those are used.

The matrix is stored in panels of columns. A panel is read from memory in one stretch, and it is narrow enough that
OpenBLAS multiplies 8 rows with it directly instead of first copying it into its own order, which would cost more than
the product. Long prompts want the opposite: many rows a product. Many kernels give a wide product the same bits as its
blocks of 16. Whether this machine's do is measured when the model loads, for each shape and each number of rows that
will be used; only what came out equal is used.

Panels are also what threads share out (`Crew`): a product is the same whoever computes it, so their number never shows
in the bits, and threads that wait sleep, while BLAS threads spin and stand in the way of whatever else runs.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from workers.engines.llama_weights import Floats

#: Rows of a product of decode rows, and of a block of a prompt.
TILE = 8
BLOCK = 16
#: Row counts tried as one product of a prompt's rows, the largest first.
WIDE_ROWS = (256, 128, 64, 32)
#: Row counts tried as a short tile of decode rows, in ascending order.
SHORT_ROWS = range(2, TILE)
#: Panels that a short tile is tried with: all have one shape.
_TRIED_PANELS = 4


def padded(rows: int, unit: int) -> int:
    """The number of rows with padding to whole units."""
    return -(-rows // unit) * unit


def decode_rows_padded(count: int, short: tuple[int, ...]) -> int:
    """The number of `count` decode rows with padding: to the next of `short`, ascending, or to whole tiles."""
    return next((rows for rows in short if rows >= count), padded(count, TILE)) if count else 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """What this machine's kernels do with one shape: whether a decode row's bits are its own whatever its place; a hash
    of the bits, which tells kernels apart; which short row counts give the bits of tiles, and which wide ones those of
    blocks."""

    rows_independent: bool
    bits: str
    short: tuple[int, ...] = ()
    wide: tuple[int, ...] = ()


class Crew:
    """`threads` threads, the caller's included, that multiply panels side by side."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="panels") if threads > 1 else None

    def multiply(self, x: Floats, panels: Floats, out: Floats) -> None:
        """`out = x @ panels`, the first axis of `panels` and `out` shared out; x is broadcast over it."""
        parts = min(self._threads, len(panels))
        if self._pool is None or parts == 1:
            np.matmul(x, panels, out=out)
            return
        (_, first), *others = pairwise(len(panels) * part // parts for part in range(parts + 1))
        running = [self._pool.submit(np.matmul, x, panels[a:b], out=out[a:b]) for a, b in others]
        np.matmul(x, panels[:first], out=out[:first])
        for product in running:
            product.result()

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()


class Linear(Protocol):
    """`y = x @ matrix`."""

    def __call__(self, x: Floats, *, decode_rows: int) -> Floats:
        """x (R, inputs) -> (R, outputs): first `decode_rows` decode rows, then rows of prompts."""
        ...


class PlainLinear:
    """`y = x @ matrix`, the matrix given as `panels` (P, inputs, outputs / P), all rows in one product. A row's bits
    may depend on how many there are."""

    __slots__ = ("_crew", "_panels")

    def __init__(self, panels: Floats, crew: Crew) -> None:
        self._crew = crew
        self._panels = panels

    def __call__(self, x: Floats, *, decode_rows: int) -> Floats:  # noqa: ARG002 - all rows are alike
        y = np.empty((len(x), self._panels.shape[0] * self._panels.shape[2]), np.float32)
        _at_once(self._crew, x, self._panels, y)
        return y


class ExactLinear:
    """`y = x @ matrix`, the matrix given as `panels` (P, inputs, outputs / P), every row's bits its own."""

    __slots__ = ("_crew", "_outputs", "_panels", "_wide")

    def __init__(self, panels: Floats, crew: Crew, *, wide: tuple[int, ...] = ()) -> None:
        self._crew = crew
        self._panels = panels
        self._outputs = panels.shape[0] * panels.shape[2]
        self._wide = wide

    def __call__(self, x: Floats, *, decode_rows: int) -> Floats:
        """See `Linear`. `decode_rows`: a short tile or whole tiles; the rest: a multiple of 16."""
        y = np.empty((len(x), self._outputs), np.float32)
        if decode_rows:
            _by_tiles(self._crew, x[:decode_rows], self._panels, y[:decode_rows], min(decode_rows, TILE))
        start = decode_rows
        for size in self._wide:
            while len(x) - start >= size:
                _at_once(self._crew, x[start : start + size], self._panels, y[start : start + size])
                start += size
        if start < len(x):
            _by_tiles(self._crew, x[start:], self._panels, y[start:], BLOCK)
        return y


def _by_tiles(crew: Crew, x: Floats, panels: Floats, y: Floats, rows: int) -> None:
    """y (R, outputs) = x (R, inputs) @ matrix, `rows` rows a product."""
    count, inputs, width = panels.shape
    tiles = y.reshape(-1, rows, count, width).transpose(2, 0, 1, 3)  # (P, tiles, rows, outputs / P), a view
    crew.multiply(x.reshape(1, -1, rows, inputs), panels[:, None], tiles)


def _at_once(crew: Crew, x: Floats, panels: Floats, y: Floats) -> None:
    """The same with all rows in one product."""
    count, _, width = panels.shape
    crew.multiply(x, panels, y.reshape(-1, count, width).transpose(1, 0, 2))


def measure(panels: Floats, crew: Crew, *, limit: int = WIDE_ROWS[0]) -> Measurement:
    """Try tiles, short tiles, blocks and wide products of up to `limit` rows with this matrix.

    Kernels choose by shape, never by value, so random rows show what they do.
    """
    sizes = tuple(size for size in WIDE_ROWS if size <= limit)
    rows = max(sizes, default=BLOCK)
    x = np.random.default_rng(rows).standard_normal((rows, panels.shape[1]), dtype=np.float32)
    blocks, attempt = np.empty((2, rows, panels.shape[0] * panels.shape[2]), np.float32)
    _by_tiles(crew, x, panels, blocks, BLOCK)
    wide = []
    for size in sizes:
        _at_once(crew, x[:size], panels, attempt[:size])
        if np.array_equal(attempt[:size], blocks[:size]):
            wide.append(size)
    tiles = np.empty_like(blocks[: 2 * TILE])
    _by_tiles(crew, x[: 2 * TILE], panels, tiles, TILE)
    bits = hashlib.sha256(tiles.tobytes() + blocks[:BLOCK].tobytes()).hexdigest()
    return Measurement(
        _rows_independent(crew, x[: 2 * TILE], panels, tiles),
        bits,
        short=_short(crew, x[: 2 * TILE], panels, tiles),
        wide=tuple(wide),
    )


def _short(crew: Crew, x: Floats, panels: Floats, expected: Floats) -> tuple[int, ...]:
    """Try each short tile with every row in each of its places."""
    panels = panels[:_TRIED_PANELS]
    expected = expected[:, : panels.shape[0] * panels.shape[2]]
    same = []
    for rows in SHORT_ROWS:
        attempt = np.empty_like(expected[:rows])
        for start in range(len(x) - rows + 1):
            _by_tiles(crew, x[start : start + rows], panels, attempt, rows)
            if not np.array_equal(attempt, expected[start : start + rows]):
                break
        else:
            same.append(rows)
    return tuple(same)


def _rows_independent(crew: Crew, x: Floats, panels: Floats, expected: Floats) -> bool:
    """Move each of the 16 rows to another place among other neighbours and compare."""
    order = np.arange(2 * TILE).reshape(TILE, 2).T.ravel()  # even rows, then odd rows
    moved = np.empty_like(expected)
    _by_tiles(crew, x[order], panels, moved, TILE)
    return np.array_equal(moved, expected[order])
