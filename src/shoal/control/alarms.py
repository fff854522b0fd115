"""What is wrong with the controller itself: one line per cause, for as long as the cause lasts."""

from __future__ import annotations

import logging

log = logging.getLogger("shoal.control")

ALARMS_MAX = 32  # more than a screen of them helps nobody


class Alarms:
    """One line of text per cause. Raising a cause again replaces its line."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def raise_(self, cause: str, text: str) -> None:
        if self._texts.get(cause) == text:
            return
        log.error("alarm: %s", text)
        if cause in self._texts or len(self._texts) < ALARMS_MAX:
            self._texts[cause] = text

    def show(self, name: str, text: str) -> None:
        """Raised while there is a text."""
        if text:
            self.raise_(name, text)
        else:
            self.clear(name)

    def clear(self, cause: str) -> None:
        if self._texts.pop(cause, None) is not None:
            log.info("the alarm is over: %s", cause)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self._texts.values())
