"""The engine of every controller: agents of its own machine, and those that dial from others."""

from __future__ import annotations

from shoal.engines.linked.engine import LinkedEngine
from shoal.engines.local import LocalEngine
from shoal.model.commands import Envelope
from shoal.model.kept import FileAnswer
from shoal.model.session import SessionOrder
from shoal.ports import Inbox


class Everywhere:
    """A node has one place: names of local nodes are not given to machines that join."""

    fences = True  # those of its own machine: `NodeSpec.origin` says which they are

    def __init__(self, local: LocalEngine, linked: LinkedEngine) -> None:
        self.local = local
        self.linked = linked

    async def start(self, inbox: Inbox) -> None:
        await self.linked.start(inbox)
        await self.local.start(inbox)

    def send(self, node: str, envelope: Envelope) -> None:
        (self.local if node in self.local else self.linked).send(node, envelope)

    def invite(self, node: str, order: SessionOrder | FileAnswer) -> bool:
        """False: the node cannot be reached now."""
        place = self.local if node in self.local else self.linked
        return place.invite(node, order)

    async def resend(self) -> None:
        await self.local.resend()
        await self.linked.resend()

    async def close(self) -> None:
        await self.linked.close()
        await self.local.close()
