"""When a replica is probed next. Servers log every request, so a probe is sent only if it can show
something that the gateway does not see anyway."""

from __future__ import annotations

import msgspec

from shoal.model.service import Probe, ReplicaLoad

IDLE_TIMES = 30  # an idle replica is probed this much less often; nobody waits for its answers
# A replica that answers, but is not ready, is asked again after a tenth of the time since it first
# answered, and after this long at most.
LOADING_PART = 10
LOADING_S_MAX = 5.0


class Pulse(msgspec.Struct):
    """What the probes of one attempt have shown, and when the next is due."""

    attempt: int
    due_s: float = 0.0
    unanswered: int = 0  # in a row, since it was ready
    heard_s: float | None = None  # when it first answered
    _probed_s: float = 0.0

    def greeted(self, now_s: float, *, answered: bool, ready: bool) -> None:
        """After a probe of a replica that was not ready. One that does not listen logs nothing."""
        if answered and self.heard_s is None:
            self.heard_s = now_s
        since_s = now_s - (now_s if self.heard_s is None else self.heard_s)
        self.due_s = now_s + min(since_s / LOADING_PART, LOADING_S_MAX)
        if ready:
            self._probed_s = now_s

    def felt(self, now_s: float, *, answered: bool | None) -> None:
        """After a probe of a ready one. None: it is not known whether it answers."""
        self._probed_s = now_s
        if answered is not None:
            self.unanswered = 0 if answered else self.unanswered + 1

    def plan(self, probe: Probe, load: ReplicaLoad | None, now_s: float) -> None:
        """Decides when a ready replica is probed next, by what the gateway sees of it: one that
        answers requests is alive, and one that has none may be left alone for longer."""
        if load is not None and load.answers_per_ks:
            self._probed_s, self.unanswered = now_s, 0
        idle = load is not None and not load.in_flight and not self.unanswered
        self.due_s = self._probed_s + probe.every_ms / 1000 * (IDLE_TIMES if idle else 1)
