"""An engine that says what it is told: for tests, examples and replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from groupwise.engines import Request
from groupwise.types import Completion, Sampling


class ScriptedEngine:
    """Answers each (request, sample number) with what `script` gives for it.

    That is a `Completion`, or only its ids, which are then all at log-prob 0.
    """

    def __init__(
        self, script: Callable[[Request, int], Sequence[int] | Completion], stop_ids: Sequence[int] = ()
    ) -> None:
        self.script, self.stop_ids = script, frozenset(stop_ids)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return [[self._complete(request, n, sampling) for n in request.samples] for request in requests]

    def _complete(self, request: Request, sample: int, sampling: Sampling) -> Completion:
        answer = self.script(request, sample)
        if isinstance(answer, Completion):
            return answer
        ids = tuple(answer)[: sampling.max_tokens]
        stopped = bool(ids) and ids[-1] in self.stop_ids
        return Completion(ids, (0.0,) * len(ids), "stop" if stopped else "length")
