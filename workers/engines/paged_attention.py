"""Attention over keys and values in pages, one row's bits always the same.

A row multiplies with whole pages, so that every product has one and the same shape, whatever the length of its session.
Keys beyond the row's position are masked before the softmax, so what is in them does not matter, and the pages' parts
are added up in their order. A row's bits then depend on its own position alone: not on which pages it was given, not on
what else is computed in the same call. `measure_attention` checks on this machine's kernels that this is so.

Pages that lie in a row are one call of numpy, which makes a product of each. For several sessions at once there are two
ways to the same products: a call for each stretch of each session, or one call on copies of all their pages, which is
faster where pages are small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workers.engines.exact_linear import BLOCK, Measurement
from workers.engines.llama_weights import Floats, LlamaConfig

Indices = npt.NDArray[np.int64]

#: Positions of a page: a multiple of the prefill grid.
KV_PAGE = 64

#: Pages are copied for one common call while a stretch that saves a call has at most so many bytes (measured).
_GATHERED_BYTES = 32 * 2**10

#: Scores computed at a time for the blocks of a prompt: what stays in a core's cache.
_SCORES_BYTES = 512 * 2**10

#: (64, 64): the limit of a score, by the row's place in its page and the key's. A query does not see later keys.
_LIMITS = np.where(np.tri(KV_PAGE, dtype=np.bool_), np.float32(np.inf), np.float32(-np.inf))


class Run(NamedTuple):
    """Pages in a row: entries [start, stop) of a list of pages are the pool's pages from `page` on."""

    start: int
    stop: int
    page: int


def rows_of(pages: Sequence[int]) -> list[Run]:
    """The stretches of a list of pages that lie in a row."""
    runs: list[Run] = []
    for place, page in enumerate(pages):
        if runs and page - runs[-1].page == place - runs[-1].start:
            runs[-1] = runs[-1]._replace(stop=place + 1)
        else:
            runs.append(Run(place, place + 1, page))
    return runs


def pages_up_to(position: int) -> int:
    """How many pages a row at `position` attends to."""
    return position // KV_PAGE + 1


def _multiply(left: Floats, pages: Floats, runs: Sequence[Run], out: Floats) -> Floats:
    """`out[i] = left[i] @ pages[i-th page]`; a `left` of one entry is for all."""
    for start, stop, page in runs:
        part = left if len(left) == 1 else left[start:stop]
        np.matmul(part, pages[page : page + stop - start], out=out[start:stop])
    return out


# -- decode rows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """The pages of B decode rows, one row's after another's, N in all: in `pages` (N,) and as `runs`; which row each is
    for in `owner` (N,); each row's stretch of them in `parts`, its first and last in `firsts`, `lasts` (B,); limits of
    the scores in the last (B, 1, 1, 64). `gathered`: whether pages are copied together."""

    pages: Indices
    runs: list[Run]
    owner: Indices
    parts: list[slice]
    firsts: Indices
    lasts: Indices
    limits: Floats
    gathered: bool

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[int], int]], config: LlamaConfig) -> TokenSpans:
        """`rows`: each one's table and position."""
        pages: list[int] = []
        owner: list[int] = []
        parts: list[slice] = []
        for row, (table, position) in enumerate(rows):
            count = pages_up_to(position)
            parts.append(slice(len(pages), len(pages) + count))
            pages += table[:count]
            owner += [row] * count
        runs = rows_of(pages)
        page_bytes = 4 * KV_PAGE * config.kv_heads * (2 * config.head_dim + 1)
        return cls(
            pages=np.array(pages),
            runs=runs,
            owner=np.array(owner),
            parts=parts,
            firsts=np.array([part.start for part in parts]),
            lasts=np.array([part.stop - 1 for part in parts]),
            limits=_LIMITS[[position % KV_PAGE for _, position in rows], None, None],
            gathered=len(runs) > 1 and len(pages) * page_bytes <= len(runs) * _GATHERED_BYTES,
        )

    def multiply(self, left: Floats, pages: Floats) -> Floats:
        """left (N, kv_heads, G, K) with each one's page (kv_heads, K, J) of the pool's -> (N, kv_heads, G, J)."""
        if self.gathered:
            products: Floats = np.matmul(left, pages[self.pages])
            return products
        return _multiply(
            left, pages, self.runs, np.empty((len(self.pages), *left.shape[1:-1], pages.shape[-1]), np.float32)
        )


def attended_tokens(queries: Floats, keys: Floats, values: Floats, spans: TokenSpans) -> Floats:
    """Decode rows' queries (B, kv_heads, G, head_dim) over a layer's pages of keys (pages, kv_heads, head_dim, 64) and
    values (pages, kv_heads, 64, head_dim + 1), each up to its own position -> (B, kv_heads, G, head_dim)."""
    if len(queries) == 1:
        return _attended_token(queries, keys, values, spans)
    scores = spans.multiply(queries[spans.owner], keys)  # (N, kv_heads, G, 64)
    scores[spans.lasts] = np.minimum(scores[spans.lasts], spans.limits)
    tops = np.maximum.reduceat(np.maximum.reduce(scores, axis=-1), spans.firsts)  # (B, kv_heads, G)
    scores -= tops[spans.owner][..., None]
    np.exp(scores, out=scores)
    products = spans.multiply(scores, values)  # (N, kv_heads, G, head_dim + 1)
    sums = np.empty((*queries.shape[:-1], products.shape[-1]), np.float32)
    for row, part in enumerate(spans.parts):
        np.add.reduce(products[part], axis=0, out=sums[row])
    return _quotients(sums)


def _attended_token(queries: Floats, keys: Floats, values: Floats, spans: TokenSpans) -> Floats:
    """The same for one row alone, with fewer calls."""
    scores = spans.multiply(queries, keys)  # (N, kv_heads, G, 64)
    np.minimum(scores[-1:], spans.limits, out=scores[-1:])
    scores -= np.maximum.reduce(np.maximum.reduce(scores, axis=0), axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return _quotients(np.add.reduce(spans.multiply(scores, values), axis=0, keepdims=True))


def _quotients(sums: Floats) -> Floats:
    """The last column is the softmax's denominator, because that of the values is ones."""
    quotients: Floats = sums[..., :-1] / sums[..., -1:]
    return quotients


# -- blocks of a prompt ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Blocks of 16 rows in a row, all in one page, from batch row `row` on; `place`: of the first row in that page;
    `runs`: the stretches of the pages that they attend to, `pages` in all."""

    row: int
    blocks: int
    place: int
    pages: int
    runs: list[Run]

    @property
    def rows(self) -> slice:
        """Its batch rows."""
        return slice(self.row, self.row + self.blocks * BLOCK)


def block_spans(row: int, start: int, stop: int, runs: Sequence[Run], config: LlamaConfig) -> list[BlockSpan]:
    """Spans of a prompt's rows for positions [start, stop), both on the grid. `runs`: the stretches of its table."""
    block_bytes = 4 * BLOCK * config.heads * KV_PAGE  # of its scores with one page
    spans = []
    while start < stop:
        pages = pages_up_to(start)
        most = max(1, _SCORES_BYTES // (block_bytes * pages))
        blocks = min((min(stop, pages * KV_PAGE) - start) // BLOCK, most)
        seen = [run._replace(stop=min(run.stop, pages)) for run in runs if run.start < pages]
        spans.append(BlockSpan(row, blocks, start % KV_PAGE, pages, seen))
        start += blocks * BLOCK
        row += blocks * BLOCK
    return spans


def attended_blocks(queries: Floats, keys: Floats, values: Floats, span: BlockSpan) -> Floats:
    """A span's queries (R, kv_heads, G, head_dim) over a layer's pages, as in `attended_tokens` -> the same shape."""
    kv_heads, group, head_dim = queries.shape[1:]
    # (blocks, kv_heads, G, 16, head_dim): a block's rows of one KV head are one product with a page
    by_head = queries.reshape(span.blocks, BLOCK, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    flat = by_head.reshape(1, span.blocks, kv_heads, group * BLOCK, head_dim)
    scores = np.empty((span.pages, *flat.shape[1:-1], KV_PAGE), np.float32)
    _multiply(flat, keys[:, None], span.runs, scores)
    last = scores[-1].reshape(span.blocks, kv_heads, group, BLOCK, KV_PAGE)  # a view
    limits = _LIMITS[span.place : span.place + span.blocks * BLOCK]
    np.minimum(last, limits.reshape(span.blocks, 1, 1, BLOCK, KV_PAGE), out=last)
    scores -= np.maximum.reduce(np.maximum.reduce(scores, axis=0), axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    products = np.empty((*scores.shape[:-1], head_dim + 1), np.float32)
    _multiply(scores, values[:, None], span.runs, products)
    mixed = _quotients(np.add.reduce(products, axis=0))  # (blocks, kv_heads, G * 16, head_dim)
    return mixed.reshape(by_head.shape).transpose(0, 3, 1, 2, 4).reshape(queries.shape)


# -- this machine ----------------------------------------------------------------------------------------------------


def measure_attention(config: LlamaConfig) -> Measurement:
    """Try rows around pages' borders alone and together, with pages in a row and scattered."""
    rng = np.random.default_rng(KV_PAGE)
    heads = (config.kv_heads, config.heads // config.kv_heads, config.head_dim)
    near, far = np.arange(10), np.array([17, 11, 19, 10, 13, 18, 12, 16, 15, 14])
    keys = rng.standard_normal((20, config.kv_heads, config.head_dim, KV_PAGE), dtype=np.float32)
    values = rng.standard_normal((20, config.kv_heads, KV_PAGE, config.head_dim + 1), dtype=np.float32)
    keys[far], values[far] = keys[near], values[near]
    positions = [0, 63, 64, 100, 127, 130, 300, 575, 576, 639]
    queries = rng.standard_normal((len(positions), *heads), dtype=np.float32)
    start = 9 * KV_PAGE - 4 * BLOCK
    rows = rng.standard_normal((8 * BLOCK, *heads), dtype=np.float32)  # the last of one page and the first of the next

    def tokens(table: Indices, chosen: slice) -> Floats:
        spans = TokenSpans.of([(table.tolist(), position) for position in positions[chosen]], config)
        both = [replace(spans, gathered=gathered) for gathered in (False, True)]
        loose, gathered = (attended_tokens(queries[chosen], keys, values, each) for each in both)
        return np.where(loose == gathered, loose, np.nan)

    def blocks(table: Indices, chosen: slice) -> Floats:
        runs = rows_of(table.tolist())
        spans = block_spans(0, start + BLOCK * chosen.start, start + BLOCK * chosen.stop, runs, config)
        part = rows[BLOCK * chosen.start : BLOCK * chosen.stop]
        return np.concatenate([attended_blocks(part[span.rows], keys, values, span) for span in spans])

    alone = [tokens(near, slice(row, row + 1)) for row in range(len(positions))]
    by_block = [blocks(near, slice(row, row + 1)) for row in range(8)]
    one_by_one = np.concatenate(alone), np.concatenate(by_block)
    independent = all(
        np.array_equal(tokens(table, slice(0, len(positions))), one_by_one[0])
        and np.array_equal(blocks(table, slice(0, 8)), one_by_one[1])
        for table in (near, far)
    )
    bits = hashlib.sha256(b"".join(each.tobytes() for each in one_by_one)).hexdigest()
    return Measurement(rows_independent=independent, bits=bits)
