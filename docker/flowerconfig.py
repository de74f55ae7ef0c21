"""Flower's configuration in its container: where it listens, and who may look (`USER:PASSWORD` in a file, by compose's
secret `flower_user`). A file that is not there ends the start: Flower without a password would let anybody who reaches
it cancel generations."""

from __future__ import annotations

import os
from pathlib import Path

SECRET_VARIABLE = "FLOWER_USER_FILE"

address = "0.0.0.0"
port = 5555
basic_auth = [Path(os.environ.get(SECRET_VARIABLE, "/run/secrets/flower_user")).read_text(encoding="utf-8").strip()]
