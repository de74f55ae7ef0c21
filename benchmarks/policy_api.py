"""genpool's API as it is shipped, except for its policy: `python -m benchmarks.policy_api POLICY`, with gunicorn's
arguments behind it."""

from __future__ import annotations

import sys

from gunicorn.app.wsgiapp import run

from benchmarks.policies import install

if __name__ == "__main__":
    install(sys.argv[1])
    sys.argv = ["gunicorn", *sys.argv[2:]]
    run()
