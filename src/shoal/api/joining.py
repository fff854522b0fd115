"""Machines that join as nodes or as heads: what a join token gets them. Admins manage the keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta

from shoal import __version__
from shoal.api.access import Access, new_token
from shoal.api.audit import QUIET, note
from shoal.api.forwarded import HEAD_URLS
from shoal.api.handling import handles
from shoal.api.http import Closed, Request, Socket, State
from shoal.api.principal import SCOPE, Principal
from shoal.api.problems import Refusal, accepted
from shoal.api.quotas import TICKET
from shoal.api.tls import STATE
from shoal.api.watcher import REFUSED
from shoal.calls.cluster import ClusterCalls
from shoal.calls.page import MachineCalls
from shoal.calls.people import PeopleCalls
from shoal.control.heads import Heads
from shoal.control.jointoken import NOTE, parts, standing, standing_id, write_standing
from shoal.control.loop import ControlLoop
from shoal.control.stores import Stores
from shoal.engines.linked.engine import LinkedEngine
from shoal.link.wire import PROTOCOL
from shoal.model.identity import NodeKey
from shoal.model.joining import Joined, Joining, JoinTokenView, KeyView, SecretKeyView
from shoal.model.node import NodeSpec
from shoal.model.report import RemoveKey, SetKey
from shoal.model.views import Done, HeadView
from shoal.ports import StoreError

LOOK_S, LOOK_S_MAX = 0.1, 5.0
Word = Annotated[str, Meta(max_length=64)]
# In the app's state: the URL at which nodes reach the head, and the fingerprint of the certificate
# that they accept there.
NODE_URL, FINGERPRINT = "node_url", "fingerprint"


class Join:
    @handles(MachineCalls.join)
    async def join(
        self,
        request: Request,
        loop: ControlLoop,
        access: Access,
        who: Principal,
        data: Joining,
    ) -> Joined:
        spec = data.spec
        note(request.scope, on=spec.id)
        if who.node:
            raise Refusal(403, "is the key of a node; a machine joins with the join token", "token")
        if data.protocol != PROTOCOL:
            raise Refusal(422, _versions(data), "version")
        if not spec.origin:
            raise Refusal(422, "says that this is one of the head's own nodes", "origin")
        shown = loop.state.identity.keys.get(who.key)
        order = shown.order if shown is not None else ""
        if order and spec.order != order:
            raise Refusal(403, f"is for the machines of order {order} alone", "token")
        key_id, secret, hash_ = new_token()
        key = NodeKey(id=key_id, hash=hash_, node=spec.id)
        had = access.bearer(data.key) if data.key else None
        before = had.key if had is not None and had.node == spec.id else ""
        by = f"join token {who.key}"
        accepted(await loop.request(SetKey(key, data.incarnation, before, by, order)))
        await loop.settled()
        node = loop.state.nodes.get(spec.id)
        return Joined(
            node=spec.id,
            key=secret,
            urls=_urls(request),
            certificate=_from_state(request, STATE),
            incarnation=node.incarnation if node is not None else 0,
            labels=await _labels(loop, spec),
        )


class Keys:
    @handles(PeopleCalls.keys)
    def listing(self, loop: ControlLoop) -> list[KeyView]:
        keys = sorted(loop.state.identity.keys.values(), key=lambda key: (key.node, key.since_ms))
        return [_view(loop, key) for key in keys]

    @handles(PeopleCalls.join_key)
    async def join_token(self, loop: ControlLoop, stores: Stores | None) -> JoinTokenView:
        token = ""
        if stores is not None:
            with contextlib.suppress(StoreError):  # no head has led yet, so there are no tables
                token = await asyncio.to_thread(standing, stores.settings)
        # It is set before its key is stored, and whoever has it joins at once.
        if parts(token)[0] not in loop.state.identity.keys:
            raise Refusal(503, "there is no join token yet; try again in a moment", retry_s=1)
        return JoinTokenView(token=token)

    @handles(PeopleCalls.rotate_join_token)
    async def rotate(
        self, request: Request, loop: ControlLoop, who: Principal, stores: Stores | None
    ) -> SecretKeyView:
        settings = stores.settings if stores is not None else None
        before = await asyncio.to_thread(standing_id, settings) if settings is not None else ""
        key_id, secret, hash_ = new_token()
        note(request.scope, on=key_id)
        key = NodeKey(id=key_id, hash=hash_, note=NOTE)
        accepted(await loop.request(SetKey(key, who=who.user)))
        await loop.settled()
        text = secret
        if settings is not None:
            fingerprint = _from_state(request, FINGERPRINT)
            text = await asyncio.to_thread(write_standing, settings, secret, fingerprint)
        if before in loop.state.identity.keys:
            accepted(await loop.request(RemoveKey(before, who.user)))
        return SecretKeyView(key=_view(loop, key), secret=text)

    @handles(PeopleCalls.remove_key)
    async def remove(
        self, loop: ControlLoop, who: Principal, key_id: Word, stores: Stores | None
    ) -> Done:
        own = await asyncio.to_thread(standing_id, stores.settings) if stores is not None else ""
        if own and key_id == own:
            message = "is the cluster's own join token; replace it with: shoal token rotate join"
            raise Refusal(422, message, "key")
        return Done(id=accepted(await loop.request(RemoveKey(key_id, who.user))).id)


def _from_state(request: Request, name: str) -> str:
    found: Callable[[], str] | None = request.app.state.get(name)
    return str(found()) if found is not None else ""


def _urls(request: Request) -> tuple[str, ...]:
    """Where the node may dial: this head, and the others."""
    heads: tuple[str, ...] = request.app.state.get(HEAD_URLS, tuple)()
    return tuple(filter(None, dict.fromkeys((_from_state(request, NODE_URL), *heads))))


async def _labels(loop: ControlLoop, spec: NodeSpec) -> dict[str, str]:
    """Of the machine, as its engine knows them. A controller that has just started looks first."""
    order = loop.state.orders.get(spec.order)
    if order is None:
        return {}
    until = asyncio.get_running_loop().time() + LOOK_S_MAX
    while order.supply.engine not in loop.state.heard.supplied:
        if asyncio.get_running_loop().time() > until:
            break
        await asyncio.sleep(LOOK_S)
        await loop.settled()
    report = loop.state.heard.supplied.get(order.supply.engine)
    notes = report.notes if report is not None else ()
    return next((note.labels for note in notes if note.node == spec.id), {})


def _view(loop: ControlLoop, key: NodeKey) -> KeyView:
    over = 0 < key.until_ms <= loop.clock.now_ms()
    return KeyView(
        id=key.id,
        node=key.node,
        since_ms=key.since_ms,
        until_ms=key.until_ms,
        note=key.note,
        void="expired" if over else "",
    )


def _versions(data: Joining) -> str:
    older = "head" if data.protocol > PROTOCOL else "machine that joins"
    here, there = f"{__version__} (protocol {PROTOCOL})", f"{data.shoal} (protocol {data.protocol})"
    return f"Shoal is {here} on the head and {there} here: not compatible; update the {older}"


# The route that agents on other machines dial: one websocket for each node.


class NodeLink:
    @handles(MachineCalls.link)
    async def link(self, socket: Socket, linked: LinkedEngine | None) -> None:
        """Messages go straight to the engine. What is left here is the end of the connection."""
        from shoal.api.upgraded import LINE, Upgraded

        who: Principal = socket.scope[SCOPE]
        line: Any = socket.scope.get(LINE)
        if linked is None or not who.node or not isinstance(line, Upgraded):
            detail = "this is a join token; a link needs the key of a node: shoal join"
            raise Closed(detail, REFUSED)
        ticket: Any = socket.scope.get(TICKET)
        if ticket is not None:
            ticket.close()  # a link lasts for as long as its node: it is not a request under way
        # A thousand links that come back are not a thousand deeds: the join was one.
        socket.scope[QUIET] = True
        await socket.accept()
        line.hand_over(linked.accept(who.node))
        while (await socket.receive())["type"] != "websocket.disconnect":
            pass


# The heads of a cluster with a database: who leads, and how far the others are.


HEADS = "heads"  # in the application's state; None: the cluster has one head


class HeadsOfCluster:
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
