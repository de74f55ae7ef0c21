"""Matrix products whose rows do not depend on what else is in the batch, bit for bit.

BLAS picks its kernel by shape, and kernels differ in the last bits: the same row gives other bits in a batch of 1 than
in a batch of 5. So rows come in tiles, and every product has one and the same shape: 8 rows for decode rows, 16 for a
block of a prompt. A row's bits then depend on the row (and, in a block, on its place there) alone; `measure` checks on
this machine's kernels that a decode row's place does not matter either.

The matrix is stored in panels of columns. A panel is read from memory in one stretch, and it is narrow enough that
OpenBLAS multiplies 8 rows with it directly instead of first copying it into its own order, which would cost more than
the product. Long prompts want the opposite: many rows a product; and one or two decode rows alone would rather not be
padded to 8. Many kernels give a wide product the same bits as its blocks of 16, and one of 2 or 4 rows those of a tile
(a single row is another matter: a vector's product adds up in another order). Whether this machine's do is measured
when the model loads, for each shape and each number of rows that will be used; only what came out equal is used.

Panels are also what threads share out (`Crew`): a product is the same whoever computes it, so their number never shows
in the bits, and threads that wait sleep, while BLAS threads spin and stand in the way of whatever else runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from workers.engines.llama_weights import Floats

#: Rows of a product of decode rows, and of a block of a prompt.
TILE = 8
BLOCK = 16
#: Row counts tried as one product of a prompt's rows, the largest first.
WIDE_ROWS = (256, 128, 64, 32)
#: Row counts tried as the last product of decode rows, where there are too few for a tile.
PARTIAL_ROWS = (2, 4)


def padded(rows: int, unit: int) -> int:
    """The number of rows with padding to whole units."""
    return -(-rows // unit) * unit


def decode_padded(rows: int, partial: tuple[int, ...]) -> int:
    """The number of decode rows with padding: whole tiles, and the least of `partial` that holds the rest."""
    whole, rest = divmod(rows, TILE)
    return whole * TILE + (min(size for size in (*partial, TILE) if size >= rest) if rest else 0)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What this machine's kernels do with one shape: whether a decode row's bits are its own whatever its place; which
    wide row counts give the bits of blocks, and which partial ones those of tiles; and a hash of the bits, which tells
    kernels apart."""

    rows_independent: bool
    wide: tuple[int, ...]
    partial: tuple[int, ...]
    bits: str


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


class ExactLinear:
    """`y = x @ matrix`, the matrix given as `panels` (P, inputs, outputs / P)."""

    __slots__ = ("_crew", "_outputs", "_panels", "_wide")

    def __init__(self, panels: Floats, crew: Crew, *, wide: tuple[int, ...] = ()) -> None:
        self._crew = crew
        self._panels = panels
        self._outputs = panels.shape[0] * panels.shape[2]
        self._wide = wide

    def __call__(self, x: Floats, *, decode_rows: int) -> Floats:
        """x (R, inputs) -> (R, outputs): first `decode_rows`, as many as `decode_padded` says, then a multiple of 16 of
        prompt rows."""
        y = np.empty((len(x), self._outputs), np.float32)
        tiled = decode_rows - decode_rows % TILE
        if tiled:
            _by_tiles(self._crew, x[:tiled], self._panels, y[:tiled], TILE)
        if tiled < decode_rows:
            _at_once(self._crew, x[tiled:decode_rows], self._panels, y[tiled:decode_rows])
        start = decode_rows
        for size in self._wide:
            while len(x) - start >= size:
                _at_once(self._crew, x[start : start + size], self._panels, y[start : start + size])
                start += size
        if start < len(x):
            _by_tiles(self._crew, x[start:], self._panels, y[start:], BLOCK)
        return y


class FastLinear:
    """The same with all rows in one product, by whatever kernel that takes: its rows depend on how many there are."""

    __slots__ = ("_crew", "_outputs", "_panels")

    def __init__(self, panels: Floats, crew: Crew) -> None:
        self._crew = crew
        self._panels = panels
        self._outputs = panels.shape[0] * panels.shape[2]

    def __call__(self, x: Floats, *, decode_rows: int) -> Floats:  # noqa: ARG002 - that of `ExactLinear`
        """x (R, inputs) -> (R, outputs)."""
        y = np.empty((len(x), self._outputs), np.float32)
        _at_once(self._crew, x, self._panels, y)
        return y


Linear = ExactLinear | FastLinear


def linear_maker(
    crew: Crew, by_shape: Mapping[tuple[int, ...], Measurement], *, exact: bool
) -> Callable[[Floats], Linear]:
    """Makes linear maps of panels; `by_shape`: what was measured with their shapes."""

    def make(panels: Floats) -> Linear:
        return ExactLinear(panels, crew, wide=by_shape[panels.shape].wide) if exact else FastLinear(panels, crew)

    return make


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
    """Try tiles, blocks and wide products of up to `limit` rows with this matrix.

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
    partial = tuple(size for size in PARTIAL_ROWS if _is_same_by(size, crew, x[: 2 * TILE], panels, tiles))
    bits = hashlib.sha256(tiles.tobytes() + blocks[:BLOCK].tobytes()).hexdigest()
    return Measurement(_rows_independent(crew, x[: 2 * TILE], panels, tiles), tuple(wide), partial, bits)


def _is_same_by(rows: int, crew: Crew, x: Floats, panels: Floats, expected: Floats) -> bool:
    """Whether products of so many rows give what tiles give."""
    attempt = np.empty_like(expected)
    for start in range(0, len(x), rows):
        _at_once(crew, x[start : start + rows], panels, attempt[start : start + rows])
    return np.array_equal(attempt, expected)


def _rows_independent(crew: Crew, x: Floats, panels: Floats, expected: Floats) -> bool:
    """Move each of the 16 rows to another place among other neighbours and compare."""
    order = np.arange(2 * TILE).reshape(TILE, 2).T.ravel()  # even rows, then odd rows
    moved = np.empty_like(expected)
    _by_tiles(crew, x[order], panels, moved, TILE)
    return np.array_equal(moved, expected[order])
