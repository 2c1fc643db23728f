"""What rank 0 sees of generation: servers and client as children, rollouts of an update, evaluation, who joins."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from megatron_rlzero.config import Config
from megatron_rlzero.generation import http, server, token
from megatron_rlzero.generation.members import Members
from megatron_rlzero.generation.schedule import check_complete, responses_of_update
from megatron_rlzero.generation.server import Server
from megatron_rlzero.rollout import Rollout

#: seconds between two looks at the children while waiting for the client
POLL_S = 0.2
#: seconds between two lines about a start that is under way
REPORT_S = 10.0
#: seconds that ``blame`` waits for a server's end to show
BLAME_S = 2.0

Admit = Callable[[], None]


class BadServer(RuntimeError):
    """The one server that an evaluation asked is gone, or its answers are no use."""


class RolloutEngine:
    """Starts the servers (or attaches to ``rollout.urls``) and the client process. Use ``close`` in a finally.

    A server that dies during a run is taken out of it and started again, or joins again when it comes back; others
    join from RUN_DIR/servers/ (see registry.py). Whoever joins waits in ``joining`` until the loop has brought it the
    weights and says ``attach``. Whatever waits here also takes ``admit``, which is called while anyone is joining.

    Args:
        finished: graded responses of updates to come, from a checkpoint: they are not sampled again.
    """

    def __init__(self, config: Config, finished: Sequence[Rollout] = ()) -> None:
        self.config = config
        self.started = time.monotonic()
        self.client: Any = None
        self.messages: dict[tuple[str, int], list[Rollout] | BadServer] = {}
        self.requests = itertools.count()
        self.apart: set[tuple[str, int]] = set()  # messages that do not depend on the members
        self.prompts = 0
        token.use(config.rollout.token_file)
        self.connection, other = Pipe()
        self.members = Members(config, self._send)
        try:
            self.members.start()
            self.client_log = Path(config.run_dir) / "client.log"
            fd = other.fileno()
            self.client = server.spawn(
                "megatron_rlzero.generation.client", [str(fd)], server.base_environment(), self.client_log, (fd,)
            )
        except BaseException:
            self.close()
            raise
        finally:
            other.close()
        self._send(config, list(finished))

    @property
    def servers(self) -> list[Server]:
        """The members: all that requests go to."""
        return self.members.servers

    def wait_ready(self, report: Callable[[str], None] = print) -> None:
        """Waits for all servers at once and for the client; ``report`` gets a line every REPORT_S and at the end.

        Raises:
            RuntimeError: a server or the client ended, or was not ready after ``rollout.startup_timeout_s``; with
                the end of its log. Or a server is not one of ours.
        """
        first = [coming.server for coming in self.members.coming]
        reported = self.started
        while waiting := [coming.server for coming in self.members.coming]:
            for each in waiting:
                each.check_alive()
            for _, fault in self.members.arrive():
                raise RuntimeError(fault)
            seconds = time.monotonic() - self.started
            if seconds > self.config.rollout.startup_timeout_s:
                late = waiting[0]
                raise RuntimeError(f"{late.name} ({late.url}) is {self.members.not_ready()}{late.end_of_log()}")
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                report(f"waiting for {', '.join(s.name for s in waiting)}: {seconds:.0f} s")
            if self.connection.poll(POLL_S):  # ready, or an error that ends the wait
                self._take_in()
        for each in first:
            self.members.attach(each)
        while not self.prompts:
            self._receive()
        report(f"{len(self.servers)} server(s) ready after {time.monotonic() - self.started:.0f} s")

    def label_weights(self, version: int) -> None:
        """Calls what the servers loaded from ``model.path`` ``version``, where no refit sets it."""
        for each in self.servers:
            http.post(f"{each.url}/update_weight_version", {"new_version": str(version)}, timeout_s=60.0)

    def set_version(self, version: int) -> None:
        """The servers now hold ``version``: prompts of updates up to version + ``loop.max_lag`` may start.

        The first call fixes the first update: that of this version.
        """
        self._send("version", version)

    def refitted(self) -> list[str]:
        """Names of the servers that get new weights: those in rotation, and those that leave and still answer."""
        return [each.name for each in [*self.servers, *self.members.leaving]]

    def joining(self) -> list[Server]:
        """Servers that are up and checked, and wait for the weights; the same ones until something is done about it."""
        while self.connection.poll():
            self._take_in()
        self.members.look()
        return list(self.members.joining)

    def attach(self, joined: Server) -> bool:
        """It holds the weights: requests go to it from now on. False where it was lost in between."""
        return self.members.attach(joined)

    def turn_away(self, refused: Server, reason: str) -> None:
        """A joining server that is of no use, now or later; a dead one is lost, one lost before is left alone."""
        self.members.turn_away(refused, reason)

    def detach(self, name: str, reason: str) -> None:
        """No further request goes to this server, and what is in flight there is asked elsewhere.

        It is lost: started again if it is ours. One that was lost in between is left alone.
        """
        for each in [*self.servers, *self.members.joining, *self.members.leaving]:
            if each.name == name:
                self.members.lose(each, reason, alive=True)

    def take(self, update: int, admit: Admit | None = None) -> list[Rollout]:
        """All rollouts of ``update``, sorted by (item, sample); waits for them.

        Raises:
            RuntimeError: no server is left and none is coming, the client is dead or reports an error, or a response
                is missing; named, with the end of its log.
        """
        rollouts = self._wait(("update", update), admit)
        check_complete(update, responses_of_update(self.config, self.prompts, update), rollouts)
        return rollouts

    def finished(self, update: int) -> list[Rollout]:
        """All graded responses of this update and later ones that nobody has taken, without those that failed.

        By (update, item, sample), as a new engine takes them.
        """
        request = next(self.requests)
        self.apart.add(("finished", request))
        self._send("finished", request, update)
        rollouts = self._wait(("finished", request), None)
        for (kind, number), whole in self.messages.items():
            if kind == "update" and number >= update:
                rollouts += [rollout for rollout in whole if rollout.finish_reason != "failed"]
        return sorted(rollouts, key=lambda rollout: (rollout.update, rollout.item, rollout.sample))

    def evaluate(self, greedy: bool, admit: Admit | None = None) -> list[Rollout]:
        """One response to each held-out prompt with the servers' weights; training requests go on meanwhile.

        The noise is the same in every evaluation. Raises as ``take`` does.
        """
        return self.finish_evaluation(self.begin_evaluation(greedy, self.config.eval.prompts, 1, 0), admit)

    def begin_evaluation(
        self, greedy: bool, prompts: int, samples: int, concurrency: int, server: str | None = None
    ) -> int:
        """Starts ``samples`` responses to each of the first ``prompts`` held-out prompts.

        Args:
            concurrency: at most so many requests at a time; 0 is no limit.
            server: name of the one server to ask, a member or joining.

        Returns:
            What ``finish_evaluation`` waits for.
        """
        request = next(self.requests)
        url = None
        if server is not None:
            self.apart.add(("evaluation", request))
            url = next((s.url for s in [*self.servers, *self.members.joining] if s.name == server), server)
        self._send("evaluate", request, greedy, prompts, samples, concurrency, url)
        return request

    def finish_evaluation(self, request: int, admit: Admit | None = None) -> list[Rollout]:
        """The responses, sorted by (item, sample). Raises as ``take`` does.

        Raises:
            BadServer: the one server that was to be asked is gone, or its answers are no use.
        """
        return self._wait(("evaluation", request), admit)

    def blame(self, error: BaseException) -> None:
        """Raises RuntimeError naming a server that has ended, as the cause of ``error``; returns where none has.

        A dead server first shows as a failed request: its own end says more than what the request saw.
        """
        end = time.monotonic() + BLAME_S
        while time.monotonic() < end:
            for each in self.servers:
                try:
                    each.check_alive()
                except RuntimeError as death:
                    raise death from error
            time.sleep(POLL_S)

    def close(self) -> None:
        """Ends the client and the servers that were started; may be called again."""
        self.connection.close()
        children = [self.client, *self.members.processes()]
        server.stop([child for child in children if child is not None])

    def _send(self, *message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise self._client_ended() from error

    def _wait(self, key: tuple[str, int], admit: Admit | None) -> list[Rollout]:
        while key not in self.messages:
            if admit is not None and self.joining():
                admit()
            if key not in self.apart:
                self.members.check(joinable=admit is not None)
            if key not in self.messages:  # what looked for servers that join may have taken it in
                self._receive()
        answer = self.messages.pop(key)
        self.apart.discard(key)
        if isinstance(answer, BadServer):
            raise answer
        return answer

    def _receive(self) -> None:
        """Takes in one message of the client if there is one within POLL_S, and looks after the children."""
        if self.connection.poll(POLL_S):
            self._take_in()
        elif self.client.poll() is not None and not self.connection.poll():
            raise self._client_ended()
        self.members.look()

    def _take_in(self) -> None:
        try:
            kind, *content = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._client_ended() from error
        match kind:
            case "error":
                error = RuntimeError(f"rollout client: {content[0]}; see {self.client_log}")
                self.blame(error)
                raise error
            case "ready":
                (self.prompts,) = content
            case "lost":
                url, reason = content
                if (lost := self.members.find(url)) is not None:
                    self.members.lose(lost, reason)
            case "left":
                self.members.left(*content)
            case "refused":
                self.messages["evaluation", content[0]] = BadServer(content[1])
            case _:
                self.messages[kind, content[0]] = content[1]

    def _client_ended(self) -> RuntimeError:
        self.client.wait(server.GRACE_S)
        return RuntimeError(
            f"rollout client {server.how_it_ended(self.client)}; the end of {self.client_log}:\n"
            f"{server.tail(self.client_log)}"
        )
