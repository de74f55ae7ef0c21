"""One model and one context of llama.cpp, with every call checked before the library sees it.

The library answers a wrong call by ending the process (`GGML_ASSERT`), so nothing here passes on what it would not
take: more rows than a batch holds, a position that does not follow, a slot that is not there, a copy that is not of a
whole sequence. Sequences are called *slots* here; each has its own part of the KV (`kv_unified` off).

Slots are copied through their state as bytes, not by `llama_memory_seq_cp`: that ends the process unless it is given a
whole sequence, copies room that was never filled, and does so only at the next decode, so that whatever reads or writes
states before that meets old data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pool.errors import ConfigurationError
from tasks.ports import Logits
from workers.engines.llama_cpp_library import complaint, forget_complaints, library

#: Rows of a batch at most; longer prompts come in several. Compute buffers grow with it.
BATCH_ROWS = 512

_F16 = 1  # ggml_type
#: A slot's length is a multiple of this; the library would round it up.
SLOT_UNIT = 256


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """`slots` sequences of `slot_tokens` positions each; `gpu_layers`: how many layers run on a GPU, if the library was
    built for one."""

    slots: int
    slot_tokens: int
    threads: int
    gpu_layers: int = 0
    flash_attention: bool = False


@dataclass(slots=True)
class Row:
    """One token of a batch; nobody changes it. `wanted`: its logits are read afterwards."""

    slot: int
    token: int
    position: int
    wanted: bool


class DecodeFailed(RuntimeError):
    """The library could not compute a batch; `code` is its own. Slots of the batch may hold part of it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"llama.cpp could not compute a batch (code {code})")
        self.code = code


class LlamaContext:
    """Loads a model and makes its context. Raises ConfigurationError for a file or options the library cannot use.

    `decodes` counts the calls of `llama_decode`.
    """

    def __init__(self, path: Path, options: ContextOptions) -> None:
        self._lib = lib = library()
        self.decodes = 0
        self._model: Any = None
        self._context: Any = None
        self._options = options
        if not 1 <= options.slots <= lib.llama_max_parallel_sequences():
            raise ConfigurationError(
                f"llama.cpp runs up to {lib.llama_max_parallel_sequences()} sequences, not {options.slots}.",
                param="target_inflight",
            )
        if options.gpu_layers and not lib.llama_supports_gpu_offload():
            raise ConfigurationError(
                f"gpu_layers is {options.gpu_layers}, but llama.cpp was built without support for a GPU.",
                param="gpu_layers",
            )
        try:
            self._model = _load_model(path, options)
            self._context = _new_context(self._model, path, options)
        except ConfigurationError:
            self.close()
            raise
        self._memory = lib.llama_get_memory(self._context)
        self.vocabulary_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self.slot_tokens = int(lib.llama_n_ctx_seq(self._context))
        self.batch_rows = int(lib.llama_n_batch(self._context))
        self._batch = _Batch(self.batch_rows)
        self._bytes = np.empty(0, np.uint8)
        #: The library's rows of logits, by address; it has one buffer for them, of a row a slot. Making an array takes
        #: longer than drawing from it.
        self._outputs: dict[int, Logits] = {}

    @property
    def closed(self) -> bool:
        return self._context is None

    def decode(self, rows: Sequence[Row]) -> list[Logits]:
        """Compute the rows, at most `batch_rows`, and return the wanted rows of logits (V,), in order. They are the
        library's, and hold until the next call. Rows of one slot follow each other and what it holds. Raises
        DecodeFailed."""
        self._check(rows)
        self.decodes += 1
        code = self._lib.llama_decode(self._context, self._batch.filled(rows))
        if code != 0:
            raise DecodeFailed(code)
        return [self._logits(index) for index, row in enumerate(rows) if row.wanted]

    def held(self, slot: int) -> int:
        """Positions the slot holds."""
        self._check_slot(slot)
        return int(self._lib.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def cut(self, slot: int, length: int) -> bool:
        """Forget the slot's positions from `length` on. False: it holds another number than that afterwards."""
        self._check_slot(slot)
        self._lib.llama_memory_seq_rm(self._memory, slot, max(length, 0), -1)
        return self.held(slot) == length

    def state(self, slot: int) -> bytes:
        """What the slot holds, as bytes; empty when that fails."""
        try:
            return self._read(slot).tobytes()
        except MemoryError:
            return b""

    def set_state(self, slot: int, state: bytes | memoryview | npt.NDArray[np.uint8]) -> bool:
        """Replace what the slot holds. False: the bytes are not of such a context; the slot is empty then."""
        self._check_slot(slot)
        content = np.frombuffer(state, np.uint8)
        self.cut(slot, 0)
        if len(content) == 0:
            return False
        pointer = content.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if self._lib.llama_state_seq_set_data(self._context, pointer, len(content), slot) == len(content):
            return True
        self.cut(slot, 0)
        return False

    def copy(self, source: int, target: int) -> bool:
        """Make the target hold what the source holds. False: it failed, and the target is empty."""
        if self.held(source) == 0:
            return self.cut(target, 0)
        try:
            state = self._read(source)
        except MemoryError:
            self.cut(target, 0)
            return False
        return self.set_state(target, state) and self.held(target) == self.held(source)

    def swap(self, first: int, second: int) -> tuple[bool, bool]:
        """The contents of two slots change places. Returns whether each slot holds the other's; one that does not is
        empty."""
        lengths = self.held(first), self.held(second)
        kept = self.state(first) if lengths[0] else None
        moved = self.copy(second, first)
        if kept is None:
            return moved, self.cut(second, 0)
        return moved, self.set_state(second, kept) and self.held(second) == lengths[0]

    def clear(self) -> None:
        """Empty all slots, and overwrite what was in them."""
        self._lib.llama_memory_clear(self._memory, True)

    def set_threads(self, threads: int) -> None:
        """Compute with so many threads from now on."""
        self._lib.llama_set_n_threads(self._context, threads, threads)

    def close(self) -> None:
        """Free everything. Idempotent."""
        if self._context is not None:
            self._lib.llama_free(self._context)
        if self._model is not None:
            self._lib.llama_model_free(self._model)
        self._context = self._model = None

    # -- the library's own conditions --------------------------------------------------------------------------------

    def _check(self, rows: Sequence[Row]) -> None:
        if self._context is None:
            raise ValueError("the context is closed")
        if not 0 < len(rows) <= self.batch_rows:
            raise ValueError(f"a batch has 1 to {self.batch_rows} rows, not {len(rows)}")
        if sum(row.wanted for row in rows) > self._options.slots:
            raise ValueError(f"at most {self._options.slots} rows of logits can be wanted")
        expected: dict[int, int] = {}
        for row in rows:
            if row.slot not in expected:
                expected[row.slot] = self.held(row.slot)
            if row.position != expected[row.slot] or row.position >= self.slot_tokens:
                raise ValueError(f"position {row.position} does not follow what the slot holds, or is beyond its end")
            if not 0 <= row.token < self.vocabulary_size:
                raise ValueError("a token is outside the vocabulary")
            expected[row.slot] += 1

    def _check_slot(self, slot: int) -> None:
        if self._context is None or not 0 <= slot < self._options.slots:
            raise ValueError(f"there is no slot {slot}")

    def _read(self, slot: int) -> npt.NDArray[np.uint8]:
        """The slot's state in a buffer that the next call uses again; empty when that fails."""
        self._check_slot(slot)
        size = int(self._lib.llama_state_seq_get_size(self._context, slot))
        if len(self._bytes) < size:
            self._bytes = np.empty(size, np.uint8)
        pointer = self._bytes.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        written = int(self._lib.llama_state_seq_get_data(self._context, pointer, size, slot))
        return self._bytes[:written]

    def _logits(self, index: int) -> Logits:
        pointer = self._lib.llama_get_logits_ith(self._context, index)
        if not pointer:
            raise DecodeFailed(0)
        address = ctypes.addressof(pointer.contents)
        row = self._outputs.get(address)
        if row is None:
            row = self._outputs[address] = np.ctypeslib.as_array(pointer, (self.vocabulary_size,))
        return row


class _Batch:
    """A `llama_batch` over arrays of numpy's, written through memoryviews: most steps have few rows, and of all ways to
    set a few elements that is the quickest."""

    def __init__(self, rows: int) -> None:
        lib = library()
        tokens, positions, slots, counts = np.ones((4, rows), np.int32)  # one slot a row, always
        wanted = np.zeros(rows, np.int8)
        addresses = np.arange(slots.ctypes.data, slots.ctypes.data + 4 * rows, 4, dtype=np.uintp)
        self._kept = counts, addresses
        self._tokens, self._positions, self._slots = tokens.data, positions.data, slots.data
        self._wanted = wanted.data
        self._batch = lib.llama_batch()
        ints = ctypes.POINTER(ctypes.c_int32)
        self._batch.token = tokens.ctypes.data_as(ints)
        self._batch.pos = positions.ctypes.data_as(ints)
        self._batch.n_seq_id = counts.ctypes.data_as(ints)
        self._batch.seq_id = addresses.ctypes.data_as(ctypes.POINTER(ints))
        self._batch.logits = wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def filled(self, rows: Sequence[Row]) -> Any:
        for index, row in enumerate(rows):
            self._tokens[index] = row.token
            self._positions[index] = row.position
            self._slots[index] = row.slot
            self._wanted[index] = row.wanted
        self._batch.n_tokens = len(rows)
        return self._batch


def _load_model(path: Path, options: ContextOptions) -> Any:
    lib = library()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = options.gpu_layers
    params.check_tensors = True  # numbers that are none would spread to every session
    forget_complaints()
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise ConfigurationError(f"llama.cpp cannot load {path.name}{complaint()}.", param="source")
    unfit = {
        "keeps a state that cannot be cut": lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model),
        "has an encoder": lib.llama_model_has_encoder(model),
        "is no autoregressive model": lib.llama_model_is_diffusion(model) or not lib.llama_model_has_decoder(model),
        "forgets what is beyond a window": lib.llama_model_n_swa(model) > 0,
    }
    if any(unfit.values()):
        lib.llama_model_free(model)
        reasons = ", ".join(reason for reason, is_so in unfit.items() if is_so)
        raise ConfigurationError(f"{path.name} cannot be served: it {reasons}.", param="source")
    return model


def _new_context(model: Any, path: Path, options: ContextOptions) -> Any:
    lib = library()
    params = lib.llama_context_default_params()
    params.n_ctx = options.slots * options.slot_tokens
    params.n_seq_max = options.slots
    params.n_batch = params.n_ubatch = BATCH_ROWS
    params.n_outputs_max = options.slots
    params.n_threads = params.n_threads_batch = options.threads
    params.type_k = params.type_v = _F16
    params.flash_attn_type = int(options.flash_attention)
    params.kv_unified = False
    params.offload_kqv = params.op_offload = options.gpu_layers > 0
    params.no_perf = True
    forget_complaints()
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise ConfigurationError(
            f"llama.cpp cannot make {options.slots} sequences of {options.slot_tokens} positions for {path.name}"
            f"{complaint()}.",
            param="kv_budget_bytes",
        )
    return context
