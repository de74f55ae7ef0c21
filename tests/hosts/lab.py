"""Several hosts on this machine: Linux network namespaces, plugged into one switch, which is a namespace too.

Nothing of it touches the machine's own network, and nothing has a name: a namespace lives as long as a process in it,
and its first one ends with this process. As root it needs CAP_SYS_ADMIN and CAP_NET_ADMIN; as anybody else, user
namespaces that are open to everybody.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack, closing
from functools import cache
from types import TracebackType
from typing import Self

TOOLS = ("ip", "unshare", "nsenter")
#: As whoever may, or else as root of a user namespace of our own.
WAYS = (("--net",), ("--user", "--map-root-user", "--net"))
COMMAND_TIMEOUT_S = 10
HOW = (
    "run as root with CAP_SYS_ADMIN and CAP_NET_ADMIN, or allow unprivileged user namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"
)
NETWORK = "10.77.0"


class NoHosts(Exception):
    """This machine lets nobody here make network namespaces; the message says why, and what to do."""


@cache
def way() -> tuple[str, ...]:
    """unshare's options that work here. Raises NoHosts."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise NoHosts(f"no {', '.join(missing)} on PATH (Debian: iproute2, util-linux)")
    try_out = ["ip", "link", "add", "name", "one", "type", "veth", "peer", "name", "two"]
    for options in WAYS:
        tried = subprocess.run(["unshare", *options, "--", *try_out], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return options
    raise NoHosts(f"network namespaces cannot be made here ({tried.stderr.strip()}); {HOW}")


class Host:
    """One namespace with its own address."""

    def __init__(self, enter: list[str], options: tuple[str, ...], address: str = "") -> None:
        self.address = address
        # It ends when its standard input does, and that ends with us.
        self._first = subprocess.Popen(
            [*enter, "unshare", *options, "--", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._first.stdin is not None
        assert self._first.stdout is not None
        self._first.stdin.write(b"\n")
        self._first.stdin.flush()
        # An echo says that the namespace is there.
        assert self._first.stdout.read(1) == b"\n"
        as_root = ["--user", "--preserve-credentials"] if "--user" in way() else []
        #: Before a command line: it runs on this host, in a process of the same id.
        self.enter = ["nsenter", "--target", str(self.pid), *as_root, "--net", "--"]

    @property
    def pid(self) -> int:
        """Of the process that keeps the namespace."""
        return self._first.pid

    def run(self, *command: str) -> str:
        """Run a command on the host; its output."""
        done = subprocess.run(
            [*self.enter, *command], capture_output=True, text=True, check=True, timeout=COMMAND_TIMEOUT_S
        )
        return done.stdout

    def close(self) -> None:
        """The namespace goes with the last process in it."""
        assert self._first.stdin is not None
        assert self._first.stdout is not None
        self._first.stdin.close()
        self._first.wait(COMMAND_TIMEOUT_S)
        self._first.stdout.close()


class Lab:
    """A switch, and hosts `names` at 10.77.0.1, .2, ... in this order."""

    def __init__(self, *names: str) -> None:
        with ExitStack() as stack:
            self._switch = stack.enter_context(closing(Host([], way())))
            self._switch.run(*["ip", "link", "add", "name", "switch", "type", "bridge"])
            self._switch.run(*["ip", "link", "set", "dev", "switch", "up"])
            self.hosts: dict[str, Host] = {}
            for number, name in enumerate(names, 1):
                # A namespace of the same user namespace, so that a link can be passed to it.
                host = stack.enter_context(closing(Host(self._switch.enter, ("--net",), f"{NETWORK}.{number}")))
                self._switch.run(*f"ip link add name {name} type veth peer name eth0 netns {host.pid}".split())
                self._switch.run(*f"ip link set dev {name} up".split())
                self.plug(name)
                host.run(*f"ip address add {host.address}/24 dev eth0".split())
                for link in ("lo", "eth0"):
                    host.run(*f"ip link set dev {link} up".split())
                self.hosts[name] = host
            self._stack = stack.pop_all()

    def plug(self, name: str) -> None:
        """Connect a host to the switch."""
        self._switch.run("ip", "link", "set", "dev", name, "master", "switch")

    def unplug(self, name: str) -> None:
        """Cut a host off. It is not told: its packets vanish, and nobody refuses its connections."""
        self._switch.run("ip", "link", "set", "dev", name, "nomaster")

    def close(self) -> None:
        """End all hosts. Whatever else still runs on them goes on, without a network."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
