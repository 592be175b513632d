"""Symbolic equality by math-verify, in worker processes that end themselves when they take too long.

A comparison can run for ever inside one C call (`10^(10^10)`), where neither a signal handler nor a thread can stop it,
and rewards are computed in threads, where signals do not work at all. So the work is done in a process of its own that
arms a watchdog before each comparison. Workers are started on first use, kept for the next comparison, replaced when
they die, and end with this process: by `close` at exit, or because their standard input ends.

This file is also the worker's program. It is run by path and imports nothing of Groupwise, so that a worker starts in a
third of a second.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_WORKERS = max(4, os.cpu_count() or 1)
PRECISION = 50
"""Digits to which two numbers are computed; numbers that agree in all but the last ten are equal."""
MEMORY_LIMIT = 4 * 2**30


class ComparisonError(Exception):
    """The comparison did not end: no time or no worker was left. `gold_read`: the gold itself was fine."""

    def __init__(self, reason: str, *, gold_read: bool = False) -> None:
        super().__init__(reason)
        self.gold_read = gold_read


class Comparer:
    """Compares pairs of LaTeX expressions, all within one time limit in seconds; starting a worker does not count."""

    def __init__(self, seconds: float) -> None:
        self.seconds_left = seconds

    def same(self, gold: str, answer: str, tolerance: float = 0.0) -> bool:
        """Whether two expressions are equal; numbers may differ by `tolerance`. What cannot be read equals nothing.

        Raises:
            ComparisonError: time ran out, or no worker could be had.
        """
        if self.seconds_left <= 0:
            raise ComparisonError("no time is left", gold_read=True)
        with _worker() as worker:
            start = time.monotonic()
            try:
                return worker.same(gold, answer, tolerance, self.seconds_left)
            finally:
                self.seconds_left -= time.monotonic() - start


class _Worker:
    """A worker process that is ready, or about to be."""

    def __init__(self) -> None:
        # -P keeps this folder, whose modules are named like some of the standard library, off the worker's path.
        command = [sys.executable, "-P", __file__]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            self.process = subprocess.Popen(command, encoding="utf-8", **pipes)
        except OSError as error:
            raise ComparisonError(f"no worker could be started: {error}") from error
        self.ready = False

    def wait_until_ready(self) -> None:
        if not self.ready and self._receive() != "ready":
            raise ComparisonError("the worker did not start; is math-verify installed?")
        self.ready = True

    def same(self, gold: str, answer: str, tolerance: float, seconds: float) -> bool:
        try:
            print(json.dumps([gold, answer, tolerance, seconds]), file=self._stdin, flush=True)
        except OSError as error:
            raise ComparisonError("the worker was gone") from error
        gold_read = self._receive() == "gold read"
        verdict = self._receive()
        if verdict is None:
            # The watchdog, or a crash, is the fault of what was compared; SIGKILL (9) comes from outside.
            own_fault = self.process.wait() != -9
            raise ComparisonError("the comparison took too long", gold_read=gold_read and own_fault)
        return bool(verdict)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stdin.close()
        self._stdout.close()

    @property
    def _stdin(self) -> Any:
        return self.process.stdin

    @property
    def _stdout(self) -> Any:
        return self.process.stdout

    def _receive(self) -> Any:
        """The next reply; `None` once the worker has ended."""
        line = self._stdout.readline()
        return json.loads(line) if line else None


_idle: list[_Worker] = []
_slots = threading.BoundedSemaphore(MAX_WORKERS)


@contextmanager
def _worker() -> Iterator[_Worker]:
    """An idle worker, or a new one; it goes back when the block ends well, and is replaced when it does not."""
    with _slots:
        try:
            worker = _idle.pop()
        except IndexError:
            worker = _Worker()
        try:
            worker.wait_until_ready()
            yield worker
        except BaseException:
            was_ready = worker.ready
            worker.kill()
            if was_ready:
                _idle.append(_Worker())  # started now, so that the next comparison need not wait for it
            raise
        _idle.append(worker)


@atexit.register
def close() -> None:
    """End all idle workers."""
    while _idle:
        _idle.pop().kill()


def _after_fork() -> None:
    """A forked child must not share its parent's workers: two readers of one pipe would swap their answers."""
    global _slots
    _idle.clear()
    _slots = threading.BoundedSemaphore(MAX_WORKERS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# -- the worker's side -----------------------------------------------------------------------------------------------


def _serve() -> None:
    """Answer `[gold, answer, tolerance, seconds]` lines with "gold read" and the verdict, until standard input ends."""
    import faulthandler
    import logging

    replies, sys.stdout = sys.stdout, sys.stderr  # nothing that a library prints may be taken for a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    logging.disable(logging.CRITICAL)
    _limit_memory()
    mathematics = _Mathematics()

    def reply(value: object) -> None:
        print(json.dumps(value), file=replies, flush=True)

    mathematics.same(mathematics.read("x"), mathematics.read("x"), 0.0)  # loads what is loaded on first use
    reply("ready")
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin:
            gold, answer, tolerance, seconds = json.loads(line)
            # The watchdog is a C thread that calls _exit: it also ends a computation that never returns to Python.
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            gold_expression = mathematics.read(gold)
            reply("gold read")
            reply(mathematics.same(gold_expression, mathematics.read(answer), tolerance))
            faulthandler.cancel_dump_traceback_later()


def _limit_memory() -> None:
    """Let a huge value fail in the worker instead of taking the training machine's memory."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


class _Mathematics:
    """math-verify with its own time limits and text normalisation switched off.

    Errors are not failures here: whatever an odd expression raises in the parser or in sympy means that it cannot be
    read, or that two expressions cannot be shown to be equal.
    """

    def __init__(self) -> None:
        import sympy
        from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify

        self.sympy, self.parse, self.verify = sympy, parse, verify
        normalization = NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
        )
        self.config = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalization)]

    def read(self, text: str) -> tuple[list[Any], Any]:
        """The parsed expression, in the list that `verify` takes, and its value if it is a number."""
        try:
            parsed = self.parse(f"${text}$", self.config, fallback_mode="no_fallback", parsing_timeout=None)
            expression = parsed[0] if len(parsed) == 1 else None
            if not isinstance(expression, self.sympy.Expr) or expression.free_symbols:
                return parsed, None
            value = self.sympy.N(expression, PRECISION)
            return parsed, value if value.is_number and value.is_finite else None
        except Exception:
            return [], None

    def same(self, gold: tuple[list[Any], Any], answer: tuple[list[Any], Any], tolerance: float) -> bool:
        try:
            if gold[1] is not None and answer[1] is not None:
                # math-verify's own numeric check is absolute: to it e^-40 and e^-50 are the same.
                scale = max(abs(gold[1]), abs(answer[1]))
                return bool(abs(gold[1] - answer[1]) <= tolerance + scale * self.sympy.Float(10) ** (10 - PRECISION))
            return bool(self.verify(gold[0], answer[0], timeout_seconds=None, allow_set_relation_comp=True))
        except Exception:
            return False


if __name__ == "__main__":
    _serve()
