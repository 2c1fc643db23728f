"""Rank 0's requests to a server's control routes: JSON, with a time limit and the server's own words."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

#: straight to the server: a proxy in the environment is not for these
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


#: of every request of this process; generation/token.py puts the secret there
HEADERS: dict[str, str] = {}


class ServerError(RuntimeError):
    """The server answered with an error, or with what is no JSON object; ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def post(url: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    """POSTs ``body`` as JSON and returns the answer's JSON object, {} where it is empty.

    Raises:
        ServerError: an answer other than 200 or one that is no JSON object, with its text.
        OSError: no answer within ``timeout_s``, or no connection; TimeoutError and URLError are among them.
    """
    data = json.dumps(body).encode() if body is not None else b""
    return _open(urllib.request.Request(url, data, HEADERS | {"Content-Type": "application/json"}), timeout_s)


def get(url: str, timeout_s: float) -> dict[str, Any]:
    """GETs a JSON object, {} where the answer is empty; raises as ``post`` does."""
    return _open(urllib.request.Request(url, headers=HEADERS), timeout_s)


def _open(request: urllib.request.Request, timeout_s: float) -> dict[str, Any]:
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            text, status = response.read(), response.status
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        raise ServerError(f"{request.full_url}: HTTP {error.code}: {text[:2000]}", error.code) from error
    except http.client.HTTPException as error:  # the server ended in the middle of its answer
        raise ConnectionError(f"{request.full_url}: {error!r}") from error
    try:
        answer = json.loads(text or "{}")
    except ValueError:  # not JSON, not UTF-8
        answer = None
    if not isinstance(answer, dict):
        raise ServerError(f"{request.full_url}: not a JSON object: {text.decode(errors='replace')[:200]}", status)
    return answer
