"""Processes that compute side by side, one for each device: how a peer is measured that wants a process of its own."""

import faulthandler
import functools
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.harness import reason_of

PATIENCE = 60.0
"""Seconds after which processes are ended."""


class Workers:
    """A process for each device, which all do the same at the same time.

    Args:
      count: how many.
      make: (rank, count, file) → what does the work, in the process of that rank. Its methods are what `ask` names. The
        file does not exist; all ranks are given the same path, to find each other.
      patience: seconds after which a process that does not answer is taken for lost.
    """

    def __init__(self, count: int, make: Callable[[int, int, str], Any], patience: float = PATIENCE):
        self._patience = patience
        self._folder = tempfile.TemporaryDirectory(prefix="te_jax_bench_")
        self._lost: str | None = None
        context = multiprocessing.get_context("spawn")  # a fork would inherit JAX's threads' locks
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(count):
            connection, other = context.Pipe()
            arguments = (other, make, rank, count, str(Path(self._folder.name) / "rendezvous"), patience)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            other.close()
            self._connections.append(connection)
            self._processes.append(process)

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method in all processes, and returns what they return, by rank.

        Raises:
          RuntimeError: a process raised, ended or did not answer in time. Unless all of them raised, all are ended, and
            every later call raises too.
        """
        if self._lost is not None:
            raise RuntimeError(self._lost)
        deadline = time.monotonic() + self._patience
        answers: list[Any] = []
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((method, arguments))
            except OSError:
                self._give_up(rank, "has ended", answers)
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    self._give_up(rank, f"did not answer within {self._patience:g} s", answers)
                answers.append(connection.recv())
            except (EOFError, OSError):
                self._give_up(rank, "has ended", answers)
        problems = [answer for answer in answers if isinstance(answer, _Problem)]
        if problems and len(problems) < len(answers):
            self._give_up(answers.index(problems[0]), f"raised {problems[0].reason}", [])
        if problems:
            raise RuntimeError(problems[0].reason)
        return answers

    def close(self) -> None:
        """Ends all processes. They have nothing to lose, and one that waits for another would not end by itself."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(self._patience)
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()
        self._lost = self._lost or "the processes were ended"

    def _give_up(self, rank: int, what: str, answers: list[Any]) -> NoReturn:
        problem = next((f"; before that: {each.reason}" for each in answers if isinstance(each, _Problem)), "")
        self._lost = f"the process for device {rank} {what}{problem}"
        self.close()
        raise RuntimeError(self._lost)


@dataclass(frozen=True)
class _Problem:
    """What a process answers when it raised."""

    reason: str


def _work(
    connection: Connection, make: Callable[[int, int, str], Any], rank: int, count: int, file: str, patience: float
) -> None:
    """Answers calls until the other side closes."""

    def answer(call: Callable[[], Any]) -> Any:
        # Should the other side be gone as well, nobody else would end a process that waits for a peer.
        faulthandler.dump_traceback_later(patience + 10, exit=True)
        try:
            return call()
        except Exception as error:
            return _Problem(reason_of(error))
        finally:
            faulthandler.cancel_dump_traceback_later()

    worker = answer(functools.partial(make, rank, count, file))
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        if isinstance(worker, _Problem):
            connection.send(worker)
        else:
            connection.send(answer(lambda method=method, arguments=arguments: getattr(worker, method)(*arguments)))
