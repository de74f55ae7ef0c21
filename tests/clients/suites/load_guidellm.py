"""guidellm: a streaming run of 200 requests without an error, its token counts from our usage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REQUESTS, TOKENS = 200, 8


def test_a_streaming_run(tmp_path: Path) -> None:
    """Every request succeeds, and what the server counted is what was asked for."""
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    rows = [{"prompt": f"Tell me about {number}.", "output_tokens_count": TOKENS} for number in range(REQUESTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    backend = {
        "kind": "openai_http",
        "target": os.environ["CLIENT_URL"].removesuffix("/v1"),
        "model": os.environ["CLIENT_MODEL"],
        "api_key": os.environ["CLIENT_KEY"],
    }
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
        *("--backend", ",".join(f"{name}={value}" for name, value in backend.items())),
        *("--profile", "kind=concurrent,streams=8", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={os.environ['CLIENT_TOKENIZER']}"),
        *("--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={report}"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
    assert len(requests["successful"]) == REQUESTS
    assert not requests["errored"] and not requests["incomplete"]
    assert {request["output_tokens"] for request in requests["successful"]} == {TOKENS}
    assert min(request["prompt_tokens"] for request in requests["successful"]) > 1
