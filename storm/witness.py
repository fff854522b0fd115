"""What the world shows of itself: the seam for code that verifies, counts or draws a run."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from shoal.core.state.events.log import Event
from shoal.model.commands import Envelope, Launch
from shoal.model.job import Fault, MemberRef
from shoal.model.node import NodeSpec
from shoal.model.report import Answer, NodeReport, Request, Still


class End(enum.StrEnum):
    """How a virtual process came to its end."""

    OWN = "on its own"
    STOPPED = "by a command to stop"
    NODE_DIED = "with its node"
    VANISHED = "without a trace"
    LOST = "because it could not be woken"


class Witness:
    """Sees everything as it happens; this one ignores it."""

    def booted(self, spec: NodeSpec, incarnation: int) -> None: ...

    def powered_off(self, node: str) -> None: ...

    def started(self, node: str, launch: Launch) -> None: ...

    def ended(self, ref: MemberRef, code: int | None, how: End) -> None: ...

    def could_not_start(self, ref: MemberRef, fault: Fault) -> None: ...

    def stop_arrived(self, ref: MemberRef) -> None:
        """A command to stop reached it while it lived."""

    def lapses(self, ref: MemberRef, until_ms: int) -> None:
        """Its node stops it, because this lease is over by the node's own clock."""

    def hangs(self, ref: MemberRef) -> None:
        """It makes no more steps, and never will; called more than once."""

    def asked(self, request: Request) -> None: ...

    def withdrawn(self, request: Request) -> None:
        """The client left before any step saw its request."""

    def answered(self, request: Request, answer: Answer) -> None: ...

    def sent(self, envelope: Envelope) -> None: ...

    def started_over(self) -> None:
        """Another controller listens, which has heard nothing yet."""

    def still(self, still: Still) -> None:
        """A node has said that nothing has changed since a report that the controller has."""

    def heard(self, report: NodeReport) -> None:
        """The controller got this report, but no step has seen it yet."""

    def committed(self, events: Sequence[Event]) -> None:
        """These are in the log now; their commands have not been sent yet."""

    def stored(self, reports: Sequence[NodeReport]) -> None:
        """A step that has seen these reports is in the log now."""


class NapWitness:
    """Sees members fall asleep and wake; this one ignores it."""

    def froze(self, ref: MemberRef) -> None:
        """It stands still, on its way to sleep, and has its GPUs."""

    def fell_asleep(self, ref: MemberRef, memory_mb: int) -> None:
        """From now on it has no GPU, and so much more of its node's memory."""

    def is_woken(self, ref: MemberRef, gpus: tuple[int, ...]) -> None:
        """It has GPUs again, and still stands still."""

    def goes_on(self, ref: MemberRef, own_ms: int) -> None:
        """It works again. `own_ms`: how long it has worked, by its own clock."""
