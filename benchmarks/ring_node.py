"""One node's answers of the ring's part of the scale benchmark: the homes of many Programs, as this process sees them.

    python -m benchmarks.ring_node URL COUNT SEED

Asks in an order of its own, and prints a JSON list: the rank of each Program, by its number.
"""

from __future__ import annotations

import json
import random
import sys

from benchmarks.crowd import MODEL, SETTINGS, name_of
from pool.store.connection import connect
from pool.store.jobs import JobStore
from pool.store.programs import ProgramStore
from tasks.program_homes import Homes, Newcomer


def main() -> None:
    """Ask and print."""
    url, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    client = connect(url, max_connections=1)
    jobs = JobStore(client, result_ttl_ms=60_000, pending_per_model=1)
    homes = Homes(ProgramStore(client, jobs, MODEL, SETTINGS))
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    found = {number: homes.home(Newcomer(name_of(number), prompt_tokens=100))[0] for number in numbers}
    print(json.dumps([found[number] for number in range(count)]))


if __name__ == "__main__":
    main()
