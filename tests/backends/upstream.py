"""A server over HTTP that misbehaves as it is told: it speaks llama.cpp's `/completion` and OpenAI's API, and counts.

Its next token is a function of all tokens so far, so a generation that goes on behind its beginning is the same as one
that was never interrupted.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.engine.small_model import VOCABULARY

CONTEXT = 512
#: Tokens of plain text.
PLAIN = [token for token in range(257, VOCABULARY.size) if VOCABULARY.token_bytes(token).isascii()]
WORDS = [VOCABULARY.token_bytes(token).decode() for token in PLAIN]


def next_token(known: Sequence[int]) -> int:
    """What follows."""
    return PLAIN[(sum(known) * 31 + len(known) * 7) % len(PLAIN)]


def output_of(prompt: Sequence[int], count: int) -> list[int]:
    """The first tokens that follow a prompt."""
    known = list(prompt)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(prompt) :]


def text_of(tokens: Sequence[int]) -> str:
    """Their text."""
    return b"".join(map(VOCABULARY.token_bytes, tokens)).decode()


@dataclass(frozen=True)
class Fault:
    """Done to one request, `after` so many tokens. `drop`: the connection is reset; `end`: the answer ends as if all
    were well; `garbage`: no JSON; `nonsense`: JSON of another kind; `error`: one in the stream; `hang`: silence;
    `surrogate`: half a character in JSON; `untold`: one token's id is left out; `foreign`: a token that the vocabulary
    does not have; `status`: an answer with `status`, `headers` and `body`."""

    kind: str
    after: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"


@dataclass
class Asked:
    """A request: what it asked for, when, and whether its client left before the end."""

    path: str
    body: dict[str, Any]
    at_s: float
    left: bool = False


class Upstream:
    """Serves until closed. `delay_s`: of a token; `key`: that it wants; `linger_s`: how late it notices that a client
    has gone."""

    def __init__(self, *, delay_s: float = 0.002, key: str = "", port: int = 0) -> None:
        self.delay_s = delay_s
        self.key = key
        self.asked: list[Asked] = []
        self.faults: deque[Fault] = deque()
        self.metrics = ""
        self.in_flight = self.most_in_flight = 0
        self.late_s = 0.0
        self.endless = False
        self.vocabulary: Callable[[str], list[int]] = lambda text: VOCABULARY.encode(text, special=False)
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.upstream = self
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        """Of its API."""
        return f"http://127.0.0.1:{self.port}/v1"

    def close(self) -> None:
        """Nobody listens any more; requests that run are reset."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.reset_all()

    def begin(self, path: str, body: dict[str, Any]) -> tuple[Asked, Fault | None]:
        """A request has arrived."""
        with self._lock:
            asked = Asked(path, body, time.monotonic())
            self.asked.append(asked)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            return asked, self.faults.popleft() if self.faults else None

    def end(self) -> None:
        """Its handler is done."""
        with self._lock:
            self.in_flight -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    upstream: Upstream

    def __init__(self, *arguments: Any) -> None:
        self._sockets: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._sockets.discard(request)
        super().shutdown_request(request)

    def reset_all(self) -> None:
        """As the kernel does when a process dies."""
        for each in list(self._sockets):
            reset(each)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


def reset(connection: socket.socket) -> None:
    """Close it so that its other end finds an error."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    _is_counted = False

    def log_message(self, *_: Any) -> None:
        """Be silent."""

    @property
    def upstream(self) -> Upstream:
        return self.server.upstream

    def do_GET(self) -> None:
        """Health, facts, figures."""
        if not self._authorized():
            return
        answers: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/props": {"default_generation_settings": {"n_ctx": CONTEXT}, "total_slots": 64, "build_info": "test"},
            "/v1/models": {"object": "list", "data": [{"id": "known"}]},
        }
        if self.path == "/metrics":
            self._answer(200, self.upstream.metrics.encode())
        elif self.path in answers:
            self._answer(200, json.dumps(answers[self.path]).encode())
        else:
            self._answer(404, b"{}")

    def do_POST(self) -> None:
        """A generation."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._authorized():
            return
        if self.path == "/tokenize":
            self._answer(200, json.dumps({"tokens": self.upstream.vocabulary(body["content"])}).encode())
            return
        asked, fault = self.upstream.begin(self.path, body)
        self._is_counted = True
        try:
            if fault is not None and fault.kind == "status":
                self._answer(fault.status, fault.body, fault.headers)
            elif self.path == "/completion":
                self._complete(asked, body, fault)
            else:
                self._chat(asked, body, fault)
        except OSError:
            asked.left = True
            self.close_connection = True
        finally:
            self._uncount()

    def _uncount(self) -> None:
        """It is not in flight any more; before its last bytes go out, as nobody can know that later."""
        if self._is_counted:
            self._is_counted = False
            self.upstream.end()

    def _authorized(self) -> bool:
        if not self.upstream.key or self.headers["Authorization"] == f"Bearer {self.upstream.key}":
            return True
        self._answer(401, b"{}")
        return False

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self._uncount()
        self.end_headers()
        self.wfile.write(body)

    # -- llama.cpp

    def _complete(self, asked: Asked, body: dict[str, Any], fault: Fault | None) -> None:
        made = output_of(body["prompt"], body["n_predict"])
        probabilities = [{"id": token, "logprob": -0.5, "top_logprobs": []} for token in made]
        last = {"stop": True, "stop_type": "limit", "tokens_predicted": len(made), "timings": {"cache_n": 1}}
        if not body["stream"]:
            told = {"completion_probabilities": probabilities} if body["n_probs"] else {}
            self._answer(200, json.dumps({"tokens": made, **last, **told}).encode())
            return
        self._begin_stream()
        for at, token in enumerate(made):
            if self._done(asked, fault, at):
                return
            ids = [10**6] if fault is not None and (fault.kind, fault.after) == ("foreign", at) else [token]
            if not (fault is not None and (fault.kind, fault.after) == ("untold", at)):
                self._event({"tokens": ids, "content": "", "stop": False, "tokens_predicted": at + 1})
        if self.upstream.endless:
            self._until_left(asked)
        self._event({"tokens": [], "content": "", **last})
        self._end_stream()

    # -- OpenAI

    def _chat(self, asked: Asked, body: dict[str, Any], fault: Fault | None) -> None:
        count = body.get("max_tokens", 20)
        self._begin_stream()
        for at in range(count):
            if self._done(asked, fault, at):
                return
            word = WORDS[at % len(WORDS)]
            if fault is not None and (fault.kind, fault.after) == ("surrogate", at):
                word = "\ud83d"
            self._event({"choices": [{"index": 0, "delta": {"content": word}, "text": None, "finish_reason": None}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 5, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 2}}
        self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._end_stream()

    # -- streams

    def _done(self, asked: Asked, fault: Fault | None, at: int) -> bool:
        """Whether the fault, or the client, has ended it before token number `at`."""
        if self._has_left(self.upstream.delay_s):
            asked.left = True
            time.sleep(self.upstream.late_s)
            self.close_connection = True
            return True
        if fault is None or fault.after != at:
            return False
        if fault.kind == "drop":
            reset(self.connection)
            self.close_connection = True
        elif fault.kind == "end":
            self._end_stream()
        elif fault.kind == "garbage":
            self._chunk(b"data: {not json\n\n")
        elif fault.kind == "nonsense":
            self._event({"tokens": "many", "choices": 7})
        elif fault.kind == "error":
            self._event({"error": {"code": 500, "message": "out of cheese", "type": "server_error"}})
        elif fault.kind == "hang":
            self._until_left(asked)
        else:
            return False
        if fault.kind in ("garbage", "nonsense", "error"):
            self._until_left(asked)
        return True

    def _until_left(self, asked: Asked) -> None:
        while not self._has_left(0.02):
            pass
        asked.left = True
        self.close_connection = True
        raise ConnectionAbortedError

    def _has_left(self, within_s: float) -> bool:
        try:
            readable, _, _ = select.select([self.connection], [], [], within_s)
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _end_stream(self) -> None:
        self._uncount()
        self.wfile.write(b"0\r\n\r\n")
