"""An application whose Programs are on, the caller's side of it, and a rank that the test plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from pool.program_settings import ProgramSettings
from pool.settings import LimitSettings
from pool.store.connection import Client
from pool.store.program_keys import ProgramKeys, program_id_of
from pool.store.program_records import Stored
from tasks.api_keys import ADMIN, USER, KeyLimits, new_key
from tests.builders import sweeper, swept_steadily
from tests.webapp.conftest import settings_for
from tests.webapp.playing_worker import MODEL
from webapp.app import create_app
from webapp.auth import NOBODY
from webapp.node import Node

RESPONSES = "/v1/responses"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASKED: Mapping[str, Mapping[str, Any]] = {
    RESPONSES: {"input": "hi"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}


def context(name: str | None = None, **fields: Any) -> dict[str, Any]:
    """The body's fields of a request of this Program."""
    said = ({} if name is None else {"program_id": name}) | fields
    return {"vllm_xargs": {"agentic_context": said}}


@dataclass
class ProgramApp:
    """One application, and the store beneath it. `keys`: API keys by the name of their owner, none for none."""

    client: Client
    app: Flask
    keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def http(self) -> FlaskClient:
        """Flask's own client."""
        return self.app.test_client()

    @property
    def node(self) -> Node:
        """What the application holds."""
        node: Node = self.app.extensions["genpool"]
        return node

    def headers(self, owner: str | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """With the key of this owner."""
        return ({} if owner is None else {"Authorization": f"Bearer {self.keys[owner]}"}) | dict(more or {})

    def post(
        self, route: str = RESPONSES, *, owner: str | None = None, headers: Mapping[str, str] | None = None, **body: Any
    ) -> TestResponse:
        """A request that is right but for `body`; of /v1/responses one that is answered at once."""
        background = {"background": True} if route == RESPONSES else {}
        asked = {"model": MODEL, **ASKED[route], **background, **body}
        return self.http.post(route, json=asked, headers=self.headers(owner, headers))

    def get(self, path: str, owner: str | None = None) -> TestResponse:
        """Read something."""
        return self.http.get(path, headers=self.headers(owner))

    def finish(self, name: str, owner: str | None = None, body: dict[str, Any] | None = None) -> TestResponse:
        """End a Program."""
        return self.http.post(f"/v1/programs/{name}/finish", json=body, headers=self.headers(owner))

    def record(self, name: str, owner: str = NOBODY) -> Stored | None:
        """The Program's record."""
        return self.node.programs().store(MODEL).read(program_id_of(owner, name))

    def join(self, rank: str, incarnation: str = "life-1") -> None:
        """A process takes a rank."""
        self.node.programs().upkeep(MODEL).join(rank, incarnation)

    def plan(self) -> None:
        """What the planning thread of a process does in a turn."""
        self.node.programs().turn([MODEL], set())

    def sweep(self) -> None:
        """Carry out the timers of jobs that are due."""
        swept_steadily(self.client)
        sweeper(self.client).sweep(MODEL)

    @property
    def held(self) -> int:
        """Jobs that have not ended."""
        return int(self.client.zcard(ProgramKeys(f"{MODEL}:0").index))


#: Makes an application: its Programs' settings, limits, and keys by owner.
MakeProgramApp = Callable[..., ProgramApp]


def program_apps(url: str, client: Client, folder: Path) -> Iterator[MakeProgramApp]:
    """For a fixture: applications that end with the test, and with them all that is stored."""
    made: list[ProgramApp] = []

    def make(
        *, limits: Mapping[str, Any] | None = None, keys: Mapping[str, KeyLimits] | None = None, **programs: Any
    ) -> ProgramApp:
        settings = settings_for(url)
        lines = {owner: new_key(owner, ADMIN if owner == "admin" else USER, own) for owner, own in (keys or {}).items()}
        changed: dict[str, Any] = {
            "programs": ProgramSettings(**{"enabled": True, **programs}) if programs.pop("on", True) else None,
            "limits": LimitSettings(**{"body_bytes": 65536, "pending_per_model": 100, **(limits or {})}),
        }
        if lines:
            file = folder / f"keys-{len(made)}"
            file.write_text("\n".join(line for _, line in lines.values()))
            changed["server"] = settings.server.model_copy(update={"keys_file": str(file)})
        given = {name: value for name, value in changed.items() if value is not None}
        app = create_app(settings.model_copy(update=given))
        made.append(ProgramApp(client, app, {owner: key for owner, (key, _) in lines.items()}))
        return made[-1]

    yield make
    for each in made:
        each.node.close()
    client.flushall()
