"""The heads of a cluster with a database: who leads, and how far the others are."""

from __future__ import annotations

from collections.abc import Callable

from litestar import Controller
from litestar.datastructures import State
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from shoal.api.handling import handles
from shoal.api.problems import Refusal
from shoal.calls.cluster import ClusterCalls
from shoal.control.heads import Heads
from shoal.model.views import Done, HeadView

HEADS = "heads"  # in the application's state; None: the cluster has one head


class HeadsOfCluster(Controller):
    @handles(ClusterCalls.heads)
    def listing(self, state: State) -> list[HeadView]:
        heads: Heads | None = state.get(HEADS)
        if heads is None:
            return []
        living = {head.name for head in heads.living()}
        newest = max((head.seq for head in heads.known), default=0)
        now_ms = heads.now_ms()
        return [
            HeadView(
                name=head.name,
                url=head.url,
                version=head.version,
                role="leads" if head.leads else "standby" if head.name in living else "away",
                behind=max(0, newest - head.seq),
                seen_ms_ago=max(0, now_ms - head.seen_ms),
            )
            for head in heads.known
        ]

    @handles(ClusterCalls.forget_head)
    async def forget(self, state: State, name: str) -> Done:
        heads: Heads | None = state.get(HEADS)
        known = {head.name for head in heads.known} if heads is not None else set()
        if heads is None or name not in known:
            raise Refusal(404, f"there is no head {name[:64]!r}", "name")
        if name in {head.name for head in heads.living()}:
            raise Refusal(422, f"{name} is alive; stop it there first with: shoal down", "name")
        await heads.forget(name)
        return Done(id=name)


def checked(check: Callable[[], None]) -> Callable[[ASGIApp], ASGIApp]:
    """A middleware: before anything is answered, look whether this head still leads."""

    def middleware(app: ASGIApp) -> ASGIApp:
        async def answering(scope: Scope, receive: Receive, send: Send) -> None:
            async def sent(message: Message) -> None:
                check()
                await send(message)

            await app(scope, receive, sent)

        return answering

    return middleware
