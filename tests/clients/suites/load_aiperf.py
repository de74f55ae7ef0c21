"""aiperf: a streaming run of 200 requests without an error, its token counts from our usage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REQUESTS, TOKENS = 200, 8


def test_a_streaming_run(tmp_path: Path) -> None:
    """Every request succeeds, and what the server counted is what was asked for."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"Tell me about {number}."}) + "\n" for number in range(REQUESTS)))
    command = [
        *(str(Path(sys.executable).with_name("aiperf")), "profile", "--endpoint-type", "chat", "--streaming"),
        *("--model", os.environ["CLIENT_MODEL"], "--url", os.environ["CLIENT_URL"].removesuffix("/v1")),
        *("--api-key", os.environ["CLIENT_KEY"], "--tokenizer", os.environ["CLIENT_TOKENIZER"]),
        *("--input-file", str(prompts), "--custom-dataset-type", "single_turn", "--use-server-token-count"),
        *("--request-count", str(REQUESTS), "--concurrency", "8"),
        *("--extra-inputs", f"max_completion_tokens:{TOKENS}", "--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", str(tmp_path / "run"), "--ui", "none"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    report = json.loads((tmp_path / "run" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_summary")
    assert report["output_sequence_length"]["min"] == report["output_sequence_length"]["max"] == TOKENS
    assert report["input_sequence_length"]["min"] > 1
