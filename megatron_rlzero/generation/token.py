"""The secret that servers beyond this machine ask for: read from a file, checked on every route of a server.

vLLM's own --api-key leaves the routes for weights and pausing open.
"""

from __future__ import annotations

import hmac
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from megatron_rlzero.invariance.vllm import Settings

#: characters that a token has at least
SHORTEST = 32


def read_token(path: str | Path) -> str:
    """The token of ``rollout.token_file``.

    Raises:
        ValueError: the file is missing, can be read by others, or holds too little; says what to do.
    """
    path = Path(path)
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read ({error}); write one with: {_command(path)}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"other users may read it; chmod 600 {path}")
    if len(text) < SHORTEST or any(c.isspace() for c in text):
        raise ValueError(f"not a word of {SHORTEST} characters or more; write one with: {_command(path)}")
    return text


def _command(path: Path) -> str:
    return f"(umask 077; openssl rand -hex 32 > {path})"


def header(token: str) -> dict[str, str]:
    """What a request has to carry."""
    return {"Authorization": f"Bearer {token}"}


class RequireToken:
    """ASGI middleware of a vLLM server: a request without the token gets 401, whatever its route."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        settings = Settings.from_environment()
        self.expected = header(read_token(settings.token_file))["Authorization"].encode()

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] == "lifespan" or hmac.compare_digest(self._given(scope), self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"this server asks for the token of rollout.token_file"})
        else:
            await send({"type": "websocket.close", "code": 1008})

    @staticmethod
    def _given(scope: dict[str, Any]) -> bytes:
        return next((value for name, value in scope["headers"] if name == b"authorization"), b"")


def use(path: str) -> None:
    """Has this process's requests to servers carry the token; nothing where ``path`` is empty."""
    from megatron_rlzero.generation import http

    http.HEADERS.clear()
    if path:
        http.HEADERS.update(header(read_token(path)))
