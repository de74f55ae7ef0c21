"""A genpool worker as it is shipped, except for its policy: `python -m benchmarks.policy_worker POLICY`, with Celery's
arguments behind it."""

from __future__ import annotations

import sys

from benchmarks.policies import install
from tasks.celery import app

if __name__ == "__main__":
    install(sys.argv[1])
    app.worker_main(["worker", *sys.argv[2:]])
