"""Nodes whose reports break a step: found by halves, and set aside for a while, by name."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.model.durations import duration_text

# The state may be different soon, and the grace time of its jobs should not be over before it is
# tried again; but a node that breaks a step each time must not do so often.
ASIDE_FIRST_MS = 10_000
ASIDE_MS_MAX = 600_000
ERROR_CHARACTERS_MAX = 200


class Aside(msgspec.Struct, frozen=True):
    """`for_ms`: twice as long as the last time, unless a step has taken its report since."""

    until_ms: int
    for_ms: int
    error: str

    @property
    def why(self) -> str:
        time = duration_text(self.for_ms)
        return f"set aside for {time}, because its report breaks a step: {self.error}"


class Doubts:
    """Which nodes the next step hears. After a step that failed, the next goes without the reports
    of that one. If it goes well, they are tried in groups, alone, and a group that fails is halved.
    A step without them comes before each try, so that nobody waits for the search."""

    def __init__(self) -> None:
        self.aside: dict[str, Aside] = {}
        self._groups: list[list[str]] = []  # of nodes in doubt; the last is tried next
        self._safe = False  # a step has gone well without them since one failed

    @property
    def open(self) -> bool:
        """Another step should come soon: some nodes wait to be heard."""
        return bool(self._groups)

    @property
    def trial(self) -> list[str] | None:
        """The only nodes that the next step hears, and it hears nothing else; None: it is a usual
        step."""
        return self._groups[-1] if self._safe and self._groups else None

    def unheard(self, now_ms: int) -> set[str]:
        """Nodes that a usual step does not hear."""
        late = {node for node, aside in self.aside.items() if now_ms < aside.until_ms}
        return late.union(*self._groups)

    def holds(self, node: str) -> bool:
        return node in self.aside or any(node in group for group in self._groups)

    def passed(self, nodes: Iterable[str]) -> None:
        """A step has heard these."""
        if self.trial is not None:
            self._groups.pop()
        else:
            self._safe = True
        for node in nodes:
            self.aside.pop(node, None)

    def failed(self, nodes: list[str], error: Exception, now_ms: int) -> bool:
        """A step that has heard these has failed. False: it heard none, so no node is to blame."""
        group = self.trial
        if group is None and not nodes:
            self._groups = []
            return False
        if group is None:
            self._groups.insert(0, nodes)
        elif len(self._groups.pop()) == 1:
            self._set_aside(group[0], error, now_ms)
        else:
            half = len(group) // 2
            self._groups += [group[half:], group[:half]]
        self._safe = False
        return True

    def absolve(self) -> None:
        """Something else was to blame."""
        self.aside, self._groups = {}, []

    def _set_aside(self, node: str, error: Exception, now_ms: int) -> None:
        before = self.aside.get(node)
        for_ms = min(2 * before.for_ms, ASIDE_MS_MAX) if before is not None else ASIDE_FIRST_MS
        text = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
        self.aside[node] = Aside(now_ms + for_ms, for_ms, text)

    def alarm(self) -> str:
        return "; ".join(f"{node} is {aside.why}" for node, aside in sorted(self.aside.items()))
