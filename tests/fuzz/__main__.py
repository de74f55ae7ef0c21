"""`python -m tests.fuzz [--cases N] [--seed N]`: hostile values in every field, then schemathesis on /openapi.json.

One API node and one worker with the tiny engine; what is valid runs. Afterwards nothing may be queued, pending or
leaked, and no process may have been started anew.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.environments import program
from tests.fuzz import fields
from tests.system import TINY, System

#: What schemathesis looks at in each answer.
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance,negative_data_rejection"


def main() -> int:
    """0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Hostile requests against a live system.")
    parser.add_argument("--cases", type=int, default=20_000, help="of the fields' fuzz")
    parser.add_argument("--examples", type=int, default=200, help="of schemathesis, for each operation")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="replays an earlier run")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    sections = {"limits": {"body_bytes": fields.BODY_BYTES}, "server": {"sync_wait_seconds": 30}}
    with (
        tempfile.TemporaryDirectory(prefix="genpool-fuzz-") as folder,
        System(Path(folder), apis=1, workers=1, serves=TINY, sections=sections) as system,
    ):
        system.start()
        pids = [part.pid for part in system.parts]
        url = system.api_url(system.apis[0])
        outcome = fields.run(url, TINY, options.cases, options.seed)
        print(f"{options.cases} cases: {dict(sorted(outcome.statuses.items()))}", flush=True)
        command = _schemathesis(url, options.examples, options.seed)
        found = subprocess.run(command, cwd=folder, check=False).returncode
        system.assert_at_rest(timeout_s=60)
        assert pids == [part.pid for part in system.parts]
        errors = [
            line for part in system.parts for line in part.output().splitlines() if line.startswith("unexpected ")
        ]
    for line in [*outcome.problems[:20], *errors[:20]]:
        print(line)
    print(f"problems: {len(outcome.problems)}; schemathesis: {found}; errors in logs: {len(errors)}")
    return 1 if outcome.problems or found or errors else 0


def _schemathesis(url: str, examples: int, seed: int) -> list[str]:
    options = ["--checks", CHECKS, "--max-examples", str(examples), "--seed", str(seed), "--workers", "4"]
    # Not all models of the system have a worker, so it is not ready.
    options += ["--exclude-path", "/readyz", "--request-timeout", "60"]
    return [str(program("schemathesis")), "run", f"{url}/openapi.json", *options]


if __name__ == "__main__":
    sys.exit(main())
