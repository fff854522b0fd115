"""SIGTERM: all members finish the same step, save, and go.

Members get the signal at slightly different moments. Who gets it first proposes a step that lies
far enough ahead for everyone to hear of it in time; all others look for such a proposal now and
then, in a thread, so that the loop itself only compares two numbers.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from shoal.train.group import Group

STOPPED_CODE = 128 + signal.SIGTERM
NEVER = 1 << 62
POLL_S = 0.1
POLLS_PER_S_MAX = 1000  # of all members together: the store is one process
# By the fastest step so far, not the mean: the first steps are slow, and who does not hear of the
# stop in time goes on without the others.
AHEAD_POLLS = 10
AHEAD_STEPS_MAX = 100_000


class Stop:
    def __init__(self, group: Group) -> None:
        self._group = group
        self.asked = False
        self._proposed = False
        self.before_step = NEVER  # all members stop before they begin this step
        self._over = threading.Event()
        self._poll_s = max(POLL_S, group.world / POLLS_PER_S_MAX)
        self._thread: threading.Thread | None = None
        if threading.current_thread() is not threading.main_thread():
            return  # signals are the main thread's affair, and so is stopping
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._signalled)
        if group.world > 1:
            self._thread = threading.Thread(target=self._listen, name="shoal-stop", daemon=True)
            self._thread.start()

    def due(self, step: int, fastest_s: float) -> bool:
        """Asked before each step begins."""
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
