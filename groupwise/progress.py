"""What a person sees while a run works: one live line per stage, plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

PLAIN_LINE_EVERY_SECONDS = 5.0
WIDTH_WITHOUT_TERMINAL = 120

SHOWN = {
    "loss/sft": ("loss", "{:.3f}"),
    "reward/total": ("reward", "{:.2f}"),
    "reward/correctness": ("accuracy", "{:.0%}"),
    "eval/accuracy": ("held-out", "{:.0%}"),
    "group/no_signal": ("no signal", "{:.0%}"),
    "policy/kl_ref": ("KL", "{:.3f}"),
    "rollout/length": ("length", "{:.0f}"),
    "data/kept": ("kept", "{:.0f}"),
    "tokens/per_second": ("tokens/s", "{:,.0f}"),
}
"""Metrics on the progress line: name, label, format."""


class Progress:
    """Reports the steps of one stage after another. Use as a context manager: the terminal is restored at the end."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        if not self.console.is_terminal:
            self.console.width = WIDTH_WITHOUT_TERMINAL
        self.live: Live | None = None
        self.label = ""
        self._last_values: dict[str, float] = {}

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def start(self, label: str, total: int, done: int = 0) -> None:
        """A stage begins, or is taken up with `done` of its `total` steps taken."""
        self._close()
        self.label, self.total, self.first = label, total, done
        self.started = self.last_line = time.monotonic()
        self._last_values = {}
        if self.console.is_terminal:
            self.live = Live(console=self.console, refresh_per_second=4, transient=False)
            self.live.start()
        note = f", from step {done}" if done else ""
        self._show(f"{label}: {total} steps{note}", force=True)

    def step(self, done: int, metrics: Mapping[str, float]) -> None:
        """`done` steps have been taken; the line shows those `metrics` that are in `SHOWN`."""
        self._last_values |= {k: v for k, v in metrics.items() if k in SHOWN}
        elapsed = time.monotonic() - self.started
        left = elapsed / max(1, done - self.first) * (self.total - done)
        values = [f"{SHOWN[k][0]} {SHOWN[k][1].format(self._last_values[k])}" for k in SHOWN if k in self._last_values]
        line = "  ".join([f"{self.label}  {done}/{self.total}", *values, f"{_clock(left)} left"])
        self._show(line, force=done == self.total)

    def note(self, text: str) -> None:
        """Say something that stays."""
        self.console.print(Text(text))

    def table(self, table: Table) -> None:
        self._close()
        self.console.print(table)

    def _show(self, line: str, force: bool = False) -> None:
        if self.live is not None:
            self.live.update(Text(line, no_wrap=True, overflow="ellipsis"))
        elif force or time.monotonic() - self.last_line >= PLAIN_LINE_EVERY_SECONDS:
            self.last_line = time.monotonic()
            self.console.print(Text(line), soft_wrap=True)

    def _close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
