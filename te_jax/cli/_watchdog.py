"""The end of a run that makes no progress: one of its processes waits for another, or a device for nothing."""

from __future__ import annotations

import threading

from te_jax.cli import _processes

EXIT_STATUS = 75
"""EX_TEMPFAIL of sysexits.h: whoever started the run may start it again."""

_LOOKS_S = 5.0  # between two looks, at most


class Watchdog:
    """Ends all processes where a step takes longer than so many seconds, until it is stopped.

    It adds up what it waits between its looks, and asks no clock: a process that was suspended has not hung.

    Args:
      seconds: how long; 0 for never.
      step: the last one before these.
      way_out: what to do then, for the message.
    """

    def __init__(self, seconds: int, step: int, way_out: str):
        self._seconds, self._way_out = seconds, way_out
        self._step, self._waited = step, 0.0
        self._left = threading.Event()
        if seconds:
            threading.Thread(target=self._look, daemon=True).start()

    def stop(self) -> None:
        """Looks no longer."""
        self._left.set()

    def progressed(self, step: int) -> None:
        """This process has handed a step to its devices."""
        self._step, self._waited = step, 0.0

    def _look(self) -> None:
        pause = min(self._seconds / 4, _LOOKS_S)
        while not self._left.wait(pause):
            _processes.tell_step(self._step)
            self._waited += pause
            if self._waited > self._seconds:
                _processes.end(EXIT_STATUS, self._message())
                return

    def _message(self) -> str:
        steps, where = _processes.told_steps(), ""
        behind = [index for index, step in steps.items() if step == min(steps.values())]
        if len(behind) < len(steps):
            named = ", ".join(map(str, behind))
            several = f"es {named} of {len(steps)} are" if len(behind) > 1 else f" {named} of {len(steps)} is"
            where = f"; process{several} still at step {steps[behind[0]]}"
        return f"no step after {self._step} for {self._seconds} s (--hang-timeout){where}: {self._way_out}"
