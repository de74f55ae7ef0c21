"""Agents of a test: requests of Programs on a system, straight to the state server."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from pool.store.ids import parse_ref
from pool.store.program_keys import program_id_of
from pool.store.program_records import Arrival, Stored
from pool.store.program_upkeep import ProgramUpkeep
from pool.store.programs import ProgramStore
from tasks.payloads import GenerationRequest, Prompt, Sampling, TextPrompt, TokenPrompt
from tasks.programs import Programs
from tasks.services import open_services
from tests.system import SCRIPTED, System

TENANT = "acme"


class Agents:
    """Programs of one tenant. What they submit is kept in the system's `accepted`."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._services = open_services(system.settings, max_connections=4)
        assert self._services.programs is not None
        self.programs: Programs = self._services.programs

    def store(self, model: str = SCRIPTED) -> ProgramStore:
        """The model's Programs."""
        return self.programs.store(model)

    def upkeep(self, model: str = SCRIPTED) -> ProgramUpkeep:
        """Their upkeep."""
        return self.programs.upkeep(model)

    def plain(self, prompt: str | Sequence[int], *, model: str = SCRIPTED, **fields: Any) -> str:
        """A job of no Program, of a tenant of its own, so that it shares no KV; its id."""
        request = _request(prompt, model, fields)
        ref = self._services.submitter.submit(request, door="responses", background=True, tenant=secrets.token_hex(8))
        self._system.accepted.append(str(ref))
        return str(ref)

    def ask(
        self,
        name: str,
        prompt: str | Sequence[int],
        *,
        model: str = SCRIPTED,
        rank: str = "",
        retention_ms: int | None = None,
        **fields: Any,
    ) -> str:
        """A request of a Program; its job's id. `rank`: where a new one is bound to, by default where the rules say."""
        job = self._services.submitter.prepare(
            _request(prompt, model, fields), door="responses", background=True, tenant=TENANT
        )
        tokens = job.prompt_tokens or len(prompt)
        home, is_up = (rank, True) if rank else self.programs.home(model, key=name, prompt_tokens=tokens)
        arrival = Arrival(TENANT, name, tokens, force_ms=60_000, retention_ms=retention_ms)
        self.store(model).arrive(job, arrival, home=home, is_up=is_up)
        self._system.accepted.append(str(job.ref))
        return str(job.ref)

    def output(self, job: str) -> list[int]:
        """The token ids of a job's first choice."""
        view = self._services.store.view(parse_ref(job))
        return [token for entry in view.entries for token in entry.token_ids]

    def record(self, name: str, model: str = SCRIPTED, *, tenant: str = TENANT) -> Stored | None:
        """The Program's record."""
        return self.store(model).read(program_id_of(tenant, name))

    def state(self, name: str, model: str = SCRIPTED) -> str:
        """`active` or `paused`, "" for none."""
        record = self.record(name, model)
        return "" if record is None else record.text("state")

    def book(self, rank: str, model: str = SCRIPTED) -> dict[str, str]:
        """The book of a rank."""
        store = self.store(model)
        found = store.client.hgetall(store.keys.place(rank)["book"])
        return {name.decode(): value.decode() for name, value in found.items()}

    def close(self) -> None:
        """Close all connections."""
        self._services.close()

    def __enter__(self) -> Agents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _request(prompt: str | Sequence[int], model: str, fields: dict[str, Any]) -> GenerationRequest:
    given: Prompt = TextPrompt(text=f"{prompt}\n") if isinstance(prompt, str) else TokenPrompt(token_ids=tuple(prompt))
    options = {"max_tokens": 200, "sampling": Sampling(temperature=0.0)} | fields
    return GenerationRequest(model=model, prompt=given, **options)
