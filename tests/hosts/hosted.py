"""A System whose processes run on hosts of a Lab. The test itself is on none of them: it reaches the API node and the
state server through unix sockets, which no cut of the network touches."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from pool.store.server import StateServer, socket_path
from tests.hosts.lab import Host, Lab
from tests.system import Part, System

STATE, API, WORKERS = "state", "api", ("worker-0", "worker-1")
PORT = 6379


class HostedSystem(System):
    """A state server, an API node and two workers, each on a host of its own."""

    def __init__(self, folder: Path, lab: Lab, **options: Any) -> None:
        self.lab = lab
        self._api_socket = folder / "api.sock"
        state = folder / "state"
        super().__init__(folder, apis=0, workers=0, url=f"unix://{socket_path(state)}", **options)
        self.http = httpx.Client(timeout=30, transport=httpx.HTTPTransport(uds=str(self._api_socket)))
        self.state_url = f"redis://{lab.hosts[STATE].address}:{PORT}/0"
        self.apis = [_on(lab.hosts[API], self.api_part(0, self.state_url, "-b", f"unix:{self._api_socket}"))]
        self.workers = [
            _on(lab.hosts[name], self.worker_part(number, self.state_url)) for number, name in enumerate(WORKERS)
        ]

    def _state_part(self, binary: Path | None, appendfsync: str, extra: Sequence[str]) -> Part:  # noqa: ARG002 - as System has it
        data = self.folder / "state"
        data.mkdir(exist_ok=True)
        host = self.lab.hosts[STATE]
        # It has no password, on a network that is this test's alone.
        listen = ["--port", str(PORT), "--bind", host.address, "--protected-mode", "no"]
        return _on(host, Part("state", StateServer(data, extra_args=listen).argv(), os.environ, self.folder))

    def api_url(self, api: Part) -> str:  # noqa: ARG002 - there is one
        """A name: the socket decides."""
        return "http://api"

    def _healthy(self, api: Part) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            # httpx leaves a socket open that cannot connect.
            if probe.connect_ex(str(self._api_socket)):
                return False
        try:
            return self.http.get(f"{self.api_url(api)}/healthz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def host_of(self, worker: Part) -> str:
        """The name of the host that a worker runs on."""
        return worker.name


def _on(host: Host, part: Part) -> Part:
    part.argv[:0] = host.enter
    return part
