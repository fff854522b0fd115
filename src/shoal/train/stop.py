"""SIGTERM: all members finish the same step, save, and exit.

Members get the signal at slightly different moments. The first one proposes a step that is far
enough ahead for all members to learn of it in time. The others poll for a proposal in a thread, so
that the loop itself only compares two numbers.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from shoal.train.group import Group

STOPPED_CODE = 128 + signal.SIGTERM
NEVER = 1 << 62
POLL_S = 0.1
POLLS_PER_S_MAX = 1000  # over all members, because the store is one process
# Uses the fastest step so far, not the mean: the first steps are slow, and a member that learns of
# the stop too late would continue without the others.
AHEAD_POLLS = 10
AHEAD_STEPS_MAX = 100_000


class Stop:
    def __init__(self, group: Group) -> None:
        self._group = group
        self.asked = False
        self._proposed = False
        self.before_step = NEVER  # all members stop before this step
        self._over = threading.Event()
        self._poll_s = max(POLL_S, group.world / POLLS_PER_S_MAX)
        self._thread: threading.Thread | None = None
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread gets signals, so only it can stop
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._signalled)
        if group.world > 1:
            self._thread = threading.Thread(target=self._listen, name="shoal-stop", daemon=True)
            self._thread.start()

    def due(self, step: int, fastest_s: float) -> bool:
        """Called before each step."""
        if self.asked and not self._proposed:
            self._proposed = True
            ahead = 0
            if self._group.world > 1:
                ahead = 1 + min(
                    AHEAD_STEPS_MAX, int(AHEAD_POLLS * self._poll_s / max(fastest_s, 1e-6))
                )
            self.before_step = min(self.before_step, self._group.propose_stop(step + ahead))
        return step >= self.before_step

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _signalled(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True

    def _listen(self) -> None:
        while not self._over.wait(self._poll_s):
            step = self._group.proposed_stop()
            if step is not None:
                self.before_step = step
                return
