"""What a controller has heard of each node, as the storm's witness sees it."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.model.report import NodeReport, Still


class Contacts:
    def __init__(self) -> None:
        self._heard: dict[str, tuple[tuple[int, int], int]] = {}  # node -> number, time
        self.news: set[tuple[str, int]] = set()  # node, incarnation: heard since the last round
        self._unstored: set[str] = set()  # nodes whose last report was in a step that failed
        self.listening_ms = 0

    def start_over(self) -> None:
        self._heard, self.news, self._unstored = {}, set(), set()

    def began(self, now_ms: int) -> None:
        """A new epoch: what was heard since the last step that was stored may be heard again."""
        self.listening_ms = now_ms
        self._unstored |= {node for node, _ in self.news}

    def stored(self, nodes: Iterable[str]) -> None:
        """A step that saw reports of these nodes was stored: the same reports are old from now on,
        even if they waited while the controller recovered."""
        self._unstored.difference_update(nodes)

    def heard(self, report: NodeReport, now_ms: int) -> bool:
        """False: it is older than another."""
        node, said = report.spec.id, (report.incarnation, report.sequence)
        last = self._heard.get(node, ((0, 0), 0))[0]
        if said < last or (said == last and node not in self._unstored):
            return False
        self._unstored.discard(node)
        self._heard[node] = said, now_ms
        self.news.add((node, report.incarnation))
        return True

    def still(self, still: Still, now_ms: int) -> None:
        said = (still.incarnation, still.sequence)
        if still.node in self._heard and said == self._heard[still.node][0]:
            self._heard[still.node] = said, now_ms

    def silent_ms(self, node: str, now_ms: int) -> int:
        _, heard_ms = self._heard.get(node, ((0, 0), self.listening_ms))
        return now_ms - max(heard_ms, self.listening_ms)
