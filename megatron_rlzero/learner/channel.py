"""How rank 0 tells the other learner ranks what to do next: a key in the rendezvous store, then a broadcast.

The other ranks wait on the store, never inside a collective, so a long wait for rollouts cannot run into a collective's
deadline. Nothing is pickled.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

#: seconds between two looks at the store: at first, and at most; between them a twentieth of the time waited so far
POLL_S, LONGEST_POLL_S = 0.002, 0.05


@dataclass
class Command:
    """``kind`` names the method, ``arguments`` are JSON values, ``payload`` is bytes for tensors."""

    kind: str
    arguments: dict[str, Any]
    payload: bytes = b""


class Channel:
    """One on every rank; rank 0 sends, the others receive the same commands in the same order."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._numbers = count()

    def send(self, command: Command) -> None:
        """Rank 0: hands ``command`` to every other rank."""
        if dist.get_world_size() == 1:
            return
        head = {"kind": command.kind, "arguments": command.arguments, "bytes": len(command.payload)}
        self._store.set(f"command/{next(self._numbers)}", json.dumps(head))
        if command.payload:
            dist.broadcast(torch.frombuffer(bytearray(command.payload), dtype=torch.uint8), src=0)

    def receive(self) -> Command:
        """Other ranks: waits, for as long as it takes, for the next command."""
        key, began = f"command/{next(self._numbers)}", time.monotonic()
        while not self._store.check([key]):  # a blocking wait would keep signals out, and warns at every time-out
            time.sleep(min(max((time.monotonic() - began) / 20, POLL_S), LONGEST_POLL_S))
        head = json.loads(self._store.get(key))
        taken = f"{key}/taken"
        if self._store.add(taken, 1) == dist.get_world_size() - 1:  # nobody needs it any more
            self._store.delete_key(key)
            self._store.delete_key(taken)
        payload = torch.empty(head["bytes"], dtype=torch.uint8)
        if head["bytes"]:
            dist.broadcast(payload, src=0)
        return Command(head["kind"], head["arguments"], payload.numpy().tobytes())
