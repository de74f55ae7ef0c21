"""Of a catalogue entry: what runs the model, and in `[models.NAME.upstream]` the server over HTTP where that is one."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pool.sections import Section

#: Options of a request beyond OpenAI's own, which some servers take.
FURTHER_OPTIONS = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens")
#: What a `source` begins with whose weights are made in code.
RANDOM_PREFIX = "random:"
#: `tokenizer` of a model whose prompts are passed on as they are.
NO_TOKENIZER = "none"

#: The type of an error about a field that only some models need; its context names it as `field`.
MISSING = "missing_field"

_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
_VARIABLE = r"^([A-Za-z_][A-Za-z0-9_]*)?$"

Words = Annotated[tuple[str, ...], Field(strict=False)]


class UpstreamSettings(Section):
    """What the backends `openai_remote`, `llama_server` and `vllm_serve` need beside a model's other settings."""

    base_urls: Words = Field(
        default=(),
        max_length=64,
        description='`openai_remote`: where the API is, as `["http://gpu-1:8000/v1"]`. Each URL is a rank of its own.',
    )
    ranks_per_url: int = Field(
        default=1,
        ge=1,
        le=64,
        description='`openai_remote`: ranks behind each URL (`kind = "vllm"`: vLLM\'s `--data-parallel-size`). A rank '
        "is named to the server by the header `X-data-parallel-rank`, and its series in the metrics by `engine`.",
    )
    model: str = Field(
        default="", max_length=512, description="The server's own name of the model. Empty: the name it has here."
    )
    api_key_env: str = Field(
        default="",
        pattern=_VARIABLE,
        description="Name of the environment variable that holds the server's API key. Empty: no key is sent.",
    )
    kind: Literal["openai", "vllm", "llama_cpp"] = Field(
        default="openai",
        description="`openai_remote`: what the server is. `vllm`, `llama_cpp` with a `tokenizer`: prompts and answers "
        "travel as token ids, so that a generation goes on after the server, or a worker, was lost.",
    )
    tokenizer: str = Field(
        default="",
        description="Where the model's tokenizer is: a GGUF file, a folder as Hugging Face has it, or a `source`. "
        "`none`, or empty for `openai_remote`: prompts are passed on as they are. Else empty: the model's `source`.",
    )
    options: Words = Field(
        default=(),
        description="`openai_remote` of kind `openai`: options that the server takes beyond OpenAI's own: "
        + ", ".join(f"`{option}`" for option in FURTHER_OPTIONS)
        + ". Others are refused by name.",
    )
    program: Words = Field(
        default=(),
        description="`llama_server`, `vllm_serve`: the program, as a list of words. Empty: `llama-server`, or the "
        "package xllamacpp where that is not on PATH; `vllm serve`.",
    )
    arguments: Words = Field(
        default=(),
        description="`llama_server`, `vllm_serve`: further arguments of the program, as a list of words. No shell "
        "reads them.",
    )
    start_seconds: float = Field(
        default=600, gt=0, le=86_400, description="How long the server may take until it is ready for the first time."
    )
    first_token_seconds: float = Field(
        default=600, gt=0, le=86_400, description="How long the server may be silent before a generation's first token."
    )
    stall_seconds: float = Field(
        default=60,
        gt=0,
        le=86_400,
        description="How long it may be silent afterwards; then the request counts as lost.",
    )
    retries: int = Field(
        default=4,
        ge=0,
        le=100,
        description="How often a request that the server broke is sent again without any new token; then the "
        "generation fails by name.",
    )
    patience_seconds: float = Field(
        default=60,
        gt=0,
        le=86_400,
        description="How long generations wait for a server that is away; then they go back to the queue.",
    )

    @field_validator("base_urls")
    @classmethod
    def _are_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not _URL.fullmatch(url):
                raise ValueError("each must be http:// or https://, without a user name, a query or a fragment")
        if len(set(value)) != len(value):
            raise ValueError("no URL may be there twice")
        return tuple(url.rstrip("/") for url in value)

    @field_validator("options")
    @classmethod
    def _are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for option in value:
            if option not in FURTHER_OPTIONS:
                raise ValueError(f"knows {', '.join(FURTHER_OPTIONS)}")
        return value


class BackendSettings(Section):
    """The part of `[models.NAME]` about what runs it."""

    backend: Literal["numpy", "llama_cpp", "openai_remote", "llama_server", "vllm_serve"] = Field(
        default="numpy",
        description="What runs the model: an engine in the worker's process (`llama_cpp` needs the extra `llama`, "
        "`make llama`), a server elsewhere, or one that the worker starts ([backends.md](backends.md)).",
    )
    source: str = Field(
        default="",
        description="Where the weights come from: `smollm2-135m-instruct` (fetched into the model cache), "
        "`smollm2-135m-instruct:q4_0` (made of it, also `q4_1` and `q8_0`; needs the extra `llama`), "
        "`random:SEED` (a tiny model generated in code, for tests), or the path of a GGUF file. `vllm_serve`: a folder "
        "as Hugging Face has it. Only `openai_remote` needs none.",
    )
    upstream: UpstreamSettings = UpstreamSettings()

    @property
    def gguf_source(self) -> str | None:
        """The source whose GGUF file a worker reads; None where it reads none."""
        has_none = self.backend in ("openai_remote", "vllm_serve") or self.source.startswith(RANDOM_PREFIX)
        return None if has_none else self.source

    @property
    def shown_source(self) -> str:
        """Where it comes from, for people."""
        return self.source or " ".join(self.upstream.base_urls)

    @property
    def is_remote(self) -> bool:
        """Whether a server over HTTP runs it."""
        return self.backend in ("openai_remote", "llama_server", "vllm_serve")

    @model_validator(mode="after")
    def _has_what_its_backend_needs(self) -> BackendSettings:
        if self.backend == "openai_remote":
            if not self.upstream.base_urls:
                raise _missing("upstream.base_urls")
        elif not self.source:
            raise _missing("source")
        return self


def _missing(field: str) -> PydanticCustomError:
    """A field that is required because of what another one says. `tasks.config` words it."""
    return PydanticCustomError(MISSING, "{field} is required", {"field": field})
