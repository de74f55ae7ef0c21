"""Jobs as Completion objects, whole and in chunks."""

from __future__ import annotations

from typing import Any

from pool.store.records import JobRecord
from webapp.rendering.chunks import ChunkStream, usage_of


def completion(record: JobRecord) -> dict[str, Any]:
    """A completed (or length-limited) job."""
    return {
        "id": record.id,
        "object": "text_completion",
        "created": record.created_ms // 1000,
        "model": record.model,
        "choices": [
            {"index": index, "text": output.text, "logprobs": None, "finish_reason": output.finish_reason}
            for index, output in enumerate(record.outputs)
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
