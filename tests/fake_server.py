"""A server that answers like vLLM, or misbehaves on purpose."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron_rlzero.config import Config
from megatron_rlzero.generation.requests import ARGUMENT

END = 1
#: instead of a reply: closes the connection without an answer
CLOSE = (0, None)
Reply = Callable[[int, dict[str, Any]], tuple[int, Any]]


def good(body: dict[str, Any], version: int = 0) -> tuple[int, Any]:
    """A correct answer of three tokens."""
    tokens = [body["token_ids"][0], 7, END]
    content = [{"token_id": token, "logprob": -0.5} for token in tokens]
    choice = {
        "token_ids": tokens,
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "weight_versions": [{"version": str(version), "start": 0, "end": 3}],
    }
    return 200, {"choices": [choice]}


def identity(body: dict[str, Any]) -> tuple:
    """Prompt and key of a request."""
    return tuple(body["token_ids"]), tuple(body["sampling_params"]["extra_args"][ARGUMENT]["key"] or ())


def retries(config: Config) -> list[dict[str, Any]]:
    """What the client notes of tries that failed."""
    path = Path(config.run_dir) / "retries.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class FakeServer(ThreadingHTTPServer):
    """``reply(n, body)`` gives the n-th answer to the same prompt and key, from 1; /health answers ``health()``."""

    daemon_threads = True

    def __init__(self, reply: Reply = lambda n, body: good(body), port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.reply = reply
        self.health = lambda: 200
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def die(self) -> None:
        """As a process that is killed: what is in flight is cut off, what comes is refused."""
        self.shutdown()
        self.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news here."""


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.request)

    def finish(self) -> None:
        self.server.connections.discard(self.request)
        super().finish()

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(self.server.health(), {})
        else:
            self._send(200, {"world_size": 1})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if "extra_args" not in body["sampling_params"]:
            self._send(400, {"error": f"extra_args lacks {ARGUMENT}"})
            return
        with self.server.lock:
            self.server.bodies.append(body)
            same = [b for b in self.server.bodies if identity(b) == identity(body)]
        self._send(*self.server.reply(len(same), body))

    def _send(self, status: int, content: Any) -> None:
        if (status, content) == CLOSE:
            return
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""
