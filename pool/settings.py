"""The settings' sections: what may be configured, in which range, with which default. Nothing here reads a file.

`tasks.config` composes them from `genpool.toml` and `GENPOOL_...` variables; `docs/configuration.md` is generated from
the field descriptions below. Unknown fields are refused; units are in the names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pool.backend_settings import BackendSettings
from pool.replica_settings import ReplicaSettings
from pool.sections import Section


class ServerSettings(Section):
    """`[server]`: the HTTP side."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to listen on. One that other machines can reach needs API keys.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on.")
    processes: int = Field(default=1, ge=1, le=64, description="API processes (gunicorn workers).")
    threads: int = Field(
        default=256, ge=1, le=4096, description="Requests, waits and streams one API process serves at once."
    )
    sync_wait_seconds: float = Field(
        default=600,
        gt=0,
        le=86400,
        description="Longest a synchronous request waits before it is answered 504 with its id.",
    )
    orphan_grace_seconds: float = Field(
        default=15,
        ge=1,
        le=3600,
        description="A synchronous or plainly streamed job is cancelled when nobody has waited for it this long, "
        "because its API process died.",
    )
    keepalive_seconds: float = Field(
        default=15, gt=0, le=60, description="A stream without news sends a comment line at least this often."
    )
    receive_seconds: float = Field(
        default=25,
        gt=0,
        le=3600,
        description="A request, head and body, must arrive within this time, or its connection is cut.",
    )
    idle_seconds: float = Field(
        default=25,
        gt=0,
        le=3600,
        description="A kept-alive connection without a request is closed after this time. Behind a proxy that keeps "
        "connections: longer than the proxy does.",
    )
    keys_file: str = Field(
        default="",
        description="File of API keys, a line a key (`genpool keys new NAME`). Empty: no file. A change is noticed "
        "within a second.",
    )


class WorkerSettings(Section):
    """`[worker]`: delivery and the batching loop."""

    lease_seconds: float = Field(
        default=15, ge=1, le=600, description="How long a worker may hold a job without renewing."
    )
    renew_seconds: float = Field(default=5, gt=0, le=200, description="How often leases are renewed.")
    max_deliveries: int = Field(
        default=3,
        ge=1,
        le=100,
        description="A job that lost this many attempts in a row, each before it showed a token, fails as `poison`.",
    )
    drain_grace_seconds: float = Field(
        default=30,
        ge=0,
        le=3600,
        description="After SIGTERM, running generations may finish this long; the rest is handed back.",
    )
    stall_timeout_seconds: float = Field(
        default=60,
        ge=1,
        le=3600,
        description="A worker whose engine makes no step for this long gives up its leases and exits. Must exceed the "
        "longest step.",
    )
    flush_idle_ms: int = Field(
        default=500, ge=1, le=5000, description="How often tokens of jobs that nobody streams are written to the log."
    )

    @model_validator(mode="after")
    def _renewals_fit_the_lease(self) -> WorkerSettings:
        if self.renew_seconds * 2 > self.lease_seconds:
            raise ValueError("renew_seconds must be at most half of lease_seconds")
        return self


class LimitSettings(Section):
    """`[limits]`: bounds on what callers may send."""

    pending_per_model: int = Field(
        default=1024, ge=1, le=1_000_000, description="Choices (`n` of each job) a model holds, queued and running."
    )
    pending_per_key: int = Field(
        default=256,
        ge=1,
        le=10_000,
        description="Choices of one model that come with keys of one name and have not ended; a key's line may say "
        "otherwise.",
    )
    weight_per_key: int = Field(
        default=1,
        ge=1,
        le=100,
        description="Share of an API key that waits beside others of its lane, in proportion to theirs; a key's line "
        "may say otherwise.",
    )
    inflight_per_key: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Choices of one model in flight for keys of one name while others wait; alone they may have more. "
        "0: any number. A key's line may say otherwise.",
    )
    queue_timeout_seconds: float = Field(
        default=600,
        gt=0,
        le=604_800,
        description="A job that waits this long for a worker to begin it fails. One that goes back to the queue waits "
        "anew.",
    )
    run_timeout_seconds: float = Field(
        default=3600,
        gt=0,
        le=604_800,
        description="A job that has run this long fails. Time in which it waits for another worker does not count.",
    )
    fail_fast_without_workers: bool = Field(
        default=False,
        description="Whether a request for a model that has no worker is answered 503 at once. Else it waits for one, "
        "up to its queue timeout.",
    )
    body_bytes: int = Field(default=8 * 2**20, ge=1024, le=2**30, description="Largest request body.")


ModelName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]


class ModelSettings(BackendSettings, ReplicaSettings):
    """`[models.NAME]`: one catalogue entry."""

    enabled: bool = Field(
        default=True,
        description="Whether the model accepts requests. Jobs of one that is disabled, or "
        "removed, end by their time limits.",
    )
    threads: int = Field(default=0, ge=0, le=256, description="Threads of the engine. 0: one per core, at most 4.")
    weight_bytes: int = Field(default=0, ge=0, description="Bytes of the weights in memory; reported, not enforced.")
    kv_budget_bytes: int = Field(
        default=64 * 2**20, gt=0, description="Bytes of KV all sessions of a replica may hold."
    )
    offload_memory_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes of memory, beside `kv_budget_bytes`, for KV that Programs keep outside the engine "
        "(`programs.on_pause`). What is unused longest goes to disk, or is given up. 0: none.",
    )
    offload_disk_bytes: int = Field(
        default=0,
        ge=0,
        description="The same on disk: files without names, in the folder `offload` of `state.folder`, which vanish "
        "with the worker. 0: none.",
    )
    kv_overcommit: float = Field(
        default=1.0,
        ge=1,
        le=1024,
        description="1: a generation begins when all KV it may come to need is free. More: when its prompt's and this "
        "part of its output's is; if KV runs out after all, the youngest is paused and goes on later.",
    )
    prefix_reuse: Literal["exact", "all", "off"] = Field(
        default="exact",
        description="Which KV later prompts of the same tenant begin with. `exact`: only what gives the same bits as "
        "computing it. `all`: that of generated tokens, too. `off`: none.",
    )
    exact: bool = Field(
        default=True,
        description="`numpy`: a generation's tokens do not depend on what else is in the batch, to the bit. `false`: "
        "plain products, a little faster for few generations; promises of the same bytes do not hold then.",
    )
    scratch_bytes_per_session: int = Field(
        default=2**20, gt=0, description="Bytes of working memory counted for each active generation."
    )
    scratch_budget_bytes: int = Field(
        default=16 * 2**20, gt=0, description="Bytes of working memory; bounds the active generations."
    )
    max_active_sessions: int = Field(
        default=8, ge=1, le=1024, description="Generations active at once; bounds `target_inflight`."
    )
    max_queue_depth: int = Field(
        default=64,
        ge=0,
        le=65_536,
        description="Choices that wait inside a replica for a slot. 0: no waiting room. Jobs that find none go back to "
        "the queue.",
    )
    kept_prefixes: int = Field(
        default=2,
        ge=0,
        le=1024,
        description="`llama_cpp`: sequences beside those of `target_inflight`, in which KV stays for later prompts "
        "that begin alike. All have equal shares of `kv_budget_bytes`, which is allocated at start.",
    )
    flash_attention: bool = Field(
        default=False,
        description="`llama_cpp`: a faster attention whose last bits depend on threads and on the rest of the batch.",
    )
    gpu_layers: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="`llama_cpp`: layers that run on a GPU, where llama.cpp was built for one.",
    )
    max_batch_size: int = Field(default=8, ge=1, le=1024, description="Sessions decoded in one step.")
    max_prefill_tokens_per_tick: int = Field(
        default=512,
        ge=1,
        description="Prompt tokens prefilled between two decode steps at most; at least one chunk always runs.",
    )
    target_step_seconds: float = Field(
        default=0.25,
        ge=0,
        le=60,
        description="Beside generations in mid-stream a step takes on as many prompt tokens as fit this time, or four "
        "times that of a step without any, by what the last ones took. Less: shorter gaps between tokens, and first "
        "tokens come later. 0: always `max_prefill_tokens_per_tick`.",
    )

    drain_timeout_seconds: float = Field(
        default=120,
        ge=0,
        le=86_400,
        description="When an admin unloads it, running generations may end for this long; the rest fails as "
        "`model_unloading`.",
    )

    @model_validator(mode="after")
    def _one_session_fits(self) -> ModelSettings:
        if self.scratch_budget_bytes < self.scratch_bytes_per_session:
            raise ValueError("scratch_budget_bytes must be at least scratch_bytes_per_session")
        return self
