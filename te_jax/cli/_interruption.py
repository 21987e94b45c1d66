"""SIGINT and SIGTERM during a training run."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

_SAME_SIGNAL_S = 0.5  # coreutils' timeout sends its signal twice: to the process and to the process group


@contextlib.contextmanager
def watching() -> Iterator[list[signal.Signals]]:
    """A list that receives the first SIGINT or SIGTERM. A second one ends the process.

    A thread receives them, because a Python handler waits until XLA has compiled a program or a device has finished.
    Outside the main thread, where Python sets no handlers, nothing is watched.
    """
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    watched = (signal.SIGINT, signal.SIGTERM)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def receive(number: int) -> None:
        if not received:
            received.append(signal.Signals(number))

    def watch() -> None:
        first = 0.0
        while byte := os.read(reader, 1):
            if byte[0] not in watched:  # Python announces every signal that has a handler
                continue
            if not first:
                first = time.monotonic()
                receive(byte[0])
                print("te-jax: saving after this step; interrupt again to end at once", file=sys.stderr, flush=True)
            elif time.monotonic() > first + _SAME_SIGNAL_S:
                os._exit(128 + byte[0])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(writer)
    # The main thread knows of a signal at once when a program of XLA that the signal has ended, as ptxas, raises.
    handlers = {number: signal.signal(number, lambda number, _: receive(number)) for number in watched}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(writer)
        thread.join()
        os.close(reader)
