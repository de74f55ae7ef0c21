"""Asks the services of `make docker-check` what users would, from inside their network; arguments: an API key, the
scraper's key, and Flower's USER:PASSWORD."""

from __future__ import annotations

import sys

import httpx

API, FLOWER = "http://127.0.0.1:8000", "http://127.0.0.1:5555"
MODEL = "tiny"


def main() -> None:
    """Ends with an AssertionError where an answer is not what it should be."""
    key, metrics_key, flower_user = sys.argv[1:]
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 8}
    with httpx.Client(base_url=API, timeout=60) as http:
        assert http.get("/readyz").status_code == 200, http.get("/readyz").text
        assert http.post("/v1/completions", json=asked).status_code == 401
        http.headers["Authorization"] = f"Bearer {key}"
        answer = http.post("/v1/completions", json=asked)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"], answer.text
        assert http.get("/metrics").status_code == 403
        http.headers["Authorization"] = f"Bearer {metrics_key}"
        told = http.get("/metrics").text
    for line in ("genpool_state_up 1.0", f'genpool_ranks{{model="{MODEL}"}} 1.0'):
        assert line in told, line
    assert "genpool_state_memory_share" in told and "genpool_program_programs" in told
    assert httpx.get(f"{FLOWER}/workers", timeout=30).status_code == 401
    name, _, password = flower_user.partition(":")
    page = httpx.get(f"{FLOWER}/workers", auth=(name, password), timeout=30)
    assert page.status_code == 200 and f"{MODEL}@" in page.text


if __name__ == "__main__":
    main()
