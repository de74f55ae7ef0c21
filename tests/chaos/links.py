"""The network between each process and the state server: TCP links that can be held (silence, nothing is lost), cut
(closed and refused) or let pass. They run in a process of their own, so the driver's load does not slow them.

`python -m tests.chaos.links TARGET_PORT NAME...` prints one line `NAME PORT` a link, then obeys lines `hold NAME`,
`cut NAME` and `pass NAME` on its standard input, and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHUNK_BYTES = 65536


class Links:
    """The links' process, seen from the driver."""

    def __init__(self, target_port: int, names: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.links", str(target_port), *names],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._process.stdout is not None
        lines = [self._process.stdout.readline().split() for _ in names]
        self._ports = {name: int(port) for name, port in lines}

    def url(self, name: str) -> str:
        """The state server, over this link."""
        return f"redis://127.0.0.1:{self._ports[name]}/0"

    def set(self, name: str, mode: str) -> None:
        """`hold`, `cut` or `pass`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{mode} {name}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class Link:
    """One listening port; every connection to it is pumped to the target and back."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._open = asyncio.Event()
        self._open.set()
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def listen(self) -> None:
        """Take a free port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    def set(self, mode: str) -> None:
        """Change what the link does with its connections."""
        self._refuses = mode == "cut"
        if mode == "hold":
            self._open.clear()
        else:
            self._open.set()
        if self._refuses:
            for writer in list(self._writers):
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._open.wait()
            if self._refuses:
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(far_writer)
            try:
                pumps = [
                    asyncio.create_task(self._pump(reader, far_writer)),
                    asyncio.create_task(self._pump(far_reader, writer)),
                ]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                for pump in pumps:
                    pump.cancel()
            finally:
                self._writers.discard(far_writer)
                far_writer.transport.abort()
        except OSError:
            pass  # the server is away: the caller sees its connection closed
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._open.wait()
                writer.write(data)
                await writer.drain()


async def main(target_port: int, names: list[str]) -> None:
    """Listen, tell the ports, obey."""
    links = {name: Link(target_port) for name in names}
    for name, link in links.items():
        await link.listen()
        print(name, link.port, flush=True)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        mode, name = line.decode().split()
        links[name].set(mode)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
