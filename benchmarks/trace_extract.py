"""Makes the extracts of `benchmarks/data/` from the traces' own files, whose names and licences its README tells.

    python -m benchmarks.trace_extract CLAUDE_CODE_JSONL_GZ SWEAGENT_TAR_GZ

One line a session: `{"id", "shared": tokens of tools and system prompt, "requests": [[in, out, gap_ms, [start, length,
...]], ...]}`. Lengths are in tokens; `gap_ms` is the time from the end of the request before to this one; the last are
the 64-token blocks of the prompt, run-length coded, empty where the prompt only grows.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
#: Sessions of coding agents that are kept, of those with at least so many requests; and requests of each at most.
SESSIONS, LEAST_REQUESTS, MOST_REQUESTS = 120, 16, 60
#: Taken off a gap where the trace does not say how long the request before it took: what most take.
USUAL_API_S = 5.0
#: Characters of a token, about: these trajectories have text and no counts.
CHARACTERS = 4

Session = dict[str, Any]


def claude_code(path: Path) -> list[Session]:
    """Sessions of coding agents, evenly from all; requests of sub-agents, which are a few, left out."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        traces = [json.loads(line) for line in file]
    long = [session for trace in traces if len((session := _session(trace))["requests"]) >= LEAST_REQUESTS]
    step = max(len(long) / SESSIONS, 1)
    return [long[int(at * step)] for at in range(min(SESSIONS, len(long)))]


def _session(trace: dict[str, Any]) -> Session:
    requests: list[list[Any]] = []
    before_s, free_s = 0.0, 0.0
    for each in trace["requests"]:
        if "hash_rle" not in each:
            continue
        gap_s = max(each["t"] - free_s, 0.0) if requests else 0.0
        before_s = max(each["t"], before_s)
        free_s = before_s + each.get("api_time", USUAL_API_S)
        requests.append([each["in"], max(each["out"], 1), round(gap_s * 1000), each["hash_rle"]])
    return {
        "id": trace["id"],
        "shared": trace["tool_tokens"] + trace["system_tokens"],
        "requests": requests[:MOST_REQUESTS],
    }


def swe_agent(path: Path) -> list[Session]:
    """Trajectories with their lengths. Where one has no execution times, those that others have stand in, in order."""
    with tarfile.open(path) as archive:
        found = [
            (Path(member.name).parent.name or member.name, json.load(io.TextIOWrapper(file, encoding="utf-8")))
            for member in archive.getmembers()
            if member.name.endswith(".traj") and (file := archive.extractfile(member)) is not None
        ]
    recorded = [
        step["execution_time"] for _, each in found for step in each.get("trajectory", ()) if "execution_time" in step
    ]
    stand_ins = iter(recorded * 100)
    return [
        _trajectory(f"swe_{number:02}", each, stand_ins)
        for number, (_, each) in enumerate(found)
        if each.get("trajectory")
    ]


def _trajectory(name: str, trajectory: dict[str, Any], stand_ins: Iterator[float]) -> Session:
    history = trajectory["history"]
    first = [_tokens(turn) for turn in history if turn.get("role") in ("system", "user")][:2]
    length, gap_s, requests = sum(first), 0.0, []
    for step in trajectory["trajectory"]:
        out = max(len(step.get("response") or "") // CHARACTERS, 1)
        requests.append([length, out, round(gap_s * 1000), []])
        length += out + len(step.get("observation") or "") // CHARACTERS
        gap_s = step["execution_time"] if "execution_time" in step else next(stand_ins)
    return {"id": name, "shared": first[0] if first else 0, "requests": requests}


def _tokens(turn: dict[str, Any]) -> int:
    content = turn.get("content") or ""
    return len(content if isinstance(content, str) else json.dumps(content)) // CHARACTERS


def main() -> None:
    """Write both."""
    for name, sessions in {
        "claude_code": claude_code(Path(sys.argv[1])),
        "swe_agent": swe_agent(Path(sys.argv[2])),
    }.items():
        lines = [json.dumps(session, separators=(",", ":")) for session in sessions]
        (DATA / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
