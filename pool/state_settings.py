"""`[state]`: where jobs live. A section of the settings, as those of pool/settings.py."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from pool.sections import Section

#: A single server.
STATE_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix", "redis+socket")
#: A Redis Cluster, by some of its nodes: `redis+cluster://[user:password@]host:port,host:port/?options`.
CLUSTER_URL = (
    r"(?P<tls>rediss?)\+cluster://(?P<user>[^@/\s]*@)?"
    r"(?P<nodes>(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d+(?:,(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):\d+)*)/?(?P<options>(?:\?\S*)?)"
)
CLUSTER_SCHEMES = ("redis+cluster://", "rediss+cluster://")


def names_cluster(url: str) -> bool:
    """Whether a state URL stands for a cluster."""
    return url.startswith(CLUSTER_SCHEMES)


class StateSettings(Section):
    """`[state]`: where jobs live, and the broker beside it."""

    url: str = Field(
        default="",
        description="Redis or Valkey (>= 7.0) holding all state: one server, or a cluster as "
        "`redis+cluster://host:port,host:port`. Empty: the embedded server of this machine.",
    )
    password_file: str = Field(
        default="",
        description="File whose first line is the password of `url`, for a URL without one. Read at start.",
    )
    broker_url: str = Field(
        default="", description="Celery's broker. Empty: the same server as `url`; a cluster needs one beside it."
    )
    result_backend: str = Field(
        default="",
        description="Celery's result backend. Empty: the same server as `url`; a cluster needs one beside it.",
    )
    folder: str = Field(
        default="",
        description="Folder of the embedded server. Empty: `$XDG_STATE_HOME/genpool` (`~/.local/state/genpool`).",
    )
    appendfsync: Literal["everysec", "always"] = Field(
        default="everysec",
        description="When the embedded server's AOF is synced. `everysec` can lose the last second at a power cut.",
    )
    result_ttl_seconds: int = Field(
        default=86400, ge=1, le=31_536_000, description="How long a job can be read after it ended."
    )
    tombstone_ttl_seconds: int = Field(
        default=86400,
        ge=0,
        le=31_536_000,
        description="How much longer an ended job's id is remembered: reading it answers 410 instead of 404.",
    )
    celery_results: Literal["celery", "all"] = Field(
        default="celery",
        description="Which jobs also write a Celery result: those sent through Celery, or all of them.",
    )

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if names_cluster(value):
            if not re.fullmatch(CLUSTER_URL, value):
                raise ValueError("must be redis+cluster://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...][/?OPTIONS]")
        elif value and not re.match(rf"({'|'.join(map(re.escape, STATE_SCHEMES))})://", value):
            schemes = [*(f"{scheme}://" for scheme in STATE_SCHEMES), *CLUSTER_SCHEMES]
            raise ValueError(f"must begin with one of {', '.join(schemes)}")
        return value
