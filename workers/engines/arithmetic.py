"""How an engine computes its linear maps: exactly, so that no row's bits depend on the batch, or by plain products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from workers.engines.exact_linear import (
    SHORT_ROWS,
    Crew,
    ExactLinear,
    Linear,
    Measurement,
    PlainLinear,
    decode_rows_padded,
    measure,
)
from workers.engines.llama_weights import Floats, LlamaWeights

#: Raised whenever a change of code changes bits.
NUMERIC_POLICY = "float32;panels;tile8;block16;page64;ones-column-softmax;2"
PLAIN_POLICY = "float32;panels;plain;page64;ones-column-softmax;1"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How the linear maps are computed: `linear` makes one of its panels; `padding` is the number of rows that so many
    decode rows take."""

    invariant: bool
    policy: str
    linear: Callable[[Floats], Linear]
    padding: Callable[[int], int]
    kernels: tuple[Measurement, ...]

    @classmethod
    def plain(cls, crew: Crew) -> Arithmetic:
        return cls(False, PLAIN_POLICY, lambda panels: PlainLinear(panels, crew), int, ())

    @classmethod
    def exact(cls, weights: LlamaWeights, crew: Crew) -> Arithmetic:
        """Rows of a product by what this machine does with each shape of the layers' maps, and with the head."""
        by_shape: dict[tuple[int, ...], Measurement] = {}
        for layer in weights.layers:
            for panels in (layer.qkv, layer.output, layer.gate_up, layer.down):
                if panels.shape not in by_shape:
                    by_shape[panels.shape] = measure(panels, crew)
        # The head sees last rows only, in tiles: no wide products to measure.
        of_head = measure(weights.head, crew, limit=0)
        kernels = (*by_shape.values(), of_head)
        short = tuple(rows for rows in SHORT_ROWS if all(rows in kernel.short for kernel in kernels))
        return cls(
            invariant=all(kernel.rows_independent for kernel in kernels),
            policy=NUMERIC_POLICY,
            linear=lambda panels: ExactLinear(panels, crew, wide=by_shape.get(panels.shape, of_head).wide),
            padding=partial(decode_rows_padded, short=short),
            kernels=kernels,
        )
