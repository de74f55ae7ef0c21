"""Jobs as Completion objects, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pool.store.records import JobRecord
from webapp.rendering.chunks import ChunkStream, usage_of
from webapp.rendering.logprobs import Shown


def completion(record: JobRecord, shown: Sequence[Shown | None]) -> dict[str, Any]:
    """A completed (or length-limited) job. `shown`: by choice, its tokens with log-probabilities if it asked."""
    return {
        "id": record.id,
        "object": "text_completion",
        "created": record.created_ms // 1000,
        "model": record.model,
        "choices": [
            {
                "index": index,
                "text": output.text,
                "logprobs": None if told is None else told.columns(),
                "finish_reason": output.finish_reason,
            }
            for index, (output, told) in enumerate(zip(record.outputs, shown, strict=True))
        ],
        "usage": usage_of(record),
        "system_fingerprint": None,
    }


class CompletionStream(ChunkStream):
    """Chunks of text."""

    kind = "text_completion"

    def piece(self, text: str) -> dict[str, Any]:
        """The text itself."""
        return {"text": text}

    def told(self, shown: Shown) -> dict[str, Any]:
        """Those of the text; offsets count from the beginning of the choice."""
        return shown.columns()
