"""Where the answers to a replay's requests go."""

from __future__ import annotations

from shoal.model.report import Answer, Refused
from shoal.sim.replay.traces import TraceError


class ReplayReply:
    """A job that is refused ends the replay. `may_fail`: a wish that came too late does not."""

    def __init__(self, where: str, *, may_fail: bool = False) -> None:
        self._where = where
        self._may_fail = may_fail

    def done(self) -> bool:
        return False

    def set_result(self, answer: Answer) -> None:
        if isinstance(answer, Refused) and not self._may_fail:
            raise TraceError(f"{self._where}: {answer.field} {answer.message}")

    def set_exception(self, error: Exception) -> None:
        raise error
