"""The HTTP API: its routes, its dependencies and access to it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.api.access import Access
from shoal.api.apikeys import ApiKeys
from shoal.api.audit import Audit, audited
from shoal.api.events import Events
from shoal.api.fabric import FabricApi, StorageApi
from shoal.api.feed import Feed
from shoal.api.files import Files, Handed, part_of
from shoal.api.finding import Annotations, provide_wanted
from shoal.api.forwarded import ACCESS, SERVED, entry_for, head_urls, headed
from shoal.api.handling import Asked, Handler, handles
from shoal.api.http import Connection, State
from shoal.api.identity import Me, Tenants, Tokens, Users
from shoal.api.invites import Invites
from shoal.api.jobs import Explanations, Jobs, WaitS
from shoal.api.joining import HeadsOfCluster, Join, Keys, NodeLink
from shoal.api.ledger import Budgets, Ledger
from shoal.api.logs import Logs
from shoal.api.meeting import Meeting, Meetings, Sessions, urls_of
from shoal.api.metrics import metrics
from shoal.api.moment import MOMENTS, Moments
from shoal.api.neighbors import Neighbors
from shoal.api.notices import Rules
from shoal.api.offers import Offers
from shoal.api.packages import Packages, refuse_unknown_package
from shoal.api.page import HANDLERS, provided
from shoal.api.policy import Policies
from shoal.api.preview import Previews, rolled_back
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach, read_ahead
from shoal.api.routing import App
from shoal.api.secrets import Secrets, refuse_unknown_certificate, refuse_unknown_secrets
from shoal.api.series import Series, known_node
from shoal.api.sites import guest_service, refuse_unknown_clusters, tell_sites
from shoal.api.status_page import StatusPages
from shoal.api.supply import Supplies
from shoal.api.trials import Trials
from shoal.api.try_service import Tries, Trying
from shoal.api.views import (
    check_view,
    known_nodes,
    node_view,
    service_view,
    status_view,
)
from shoal.api.workflows import Schedules, Workflows
from shoal.calls.cluster import ClusterCalls, NodeCalls, ServiceCalls
from shoal.control.filedesk import FileDesk
from shoal.control.history.history import History
from shoal.control.home import Home
from shoal.control.loop import ControlLoop
from shoal.control.stores import Stores
from shoal.core.features.caps import caps_of
from shoal.core.features.service.serve import owner_of
from shoal.engines.linked.engine import LinkedEngine
from shoal.ledger.live import LiveLedger
from shoal.model.durations import DAY_MS
from shoal.model.hidden import without_keys
from shoal.model.node import LabelChange, NodeHealth, NodeIntent, unenforced_lines, unenforced_of
from shoal.model.report import (
    CheckNode,
    SetEnd,
    SetIntent,
    SetLabels,
    SetService,
    StopService,
)
from shoal.model.resources import WHOLE_GPU_MILLI
from shoal.model.service import GatewayEntry, ServiceSpec, problem_with_names
from shoal.model.sites import Doors, DoorView
from shoal.model.tree import NodeTree, Tree, tree_lines
from shoal.model.views import (
    CheckView,
    Done,
    NodeView,
    ServiceView,
    StatusView,
)

ENDS_IN_MS_MAX = 366 * DAY_MS
INTENT_WHY_MAX = 160

INTENTS = {
    "cordon": NodeIntent.CORDONED,
    "drain": NodeIntent.DRAINING,
    "uncordon": NodeIntent.OPEN,
}


class Cluster:
    @handles(ClusterCalls.status)
    def status(self, reach: Reach) -> StatusView:
        view = status_view(reach)
        view.caps = caps_of(reach.loop.state, reach.who.sees)
        nodes = reach.loop.state.nodes.values()
        tenants = bool(reach.loop.state.identity.tenants)
        there = {
            node.id: unenforced_of(node.spec, tenants=tenants)
            for node in nodes
            if node.health is not NodeHealth.LOST
        }
        view.unenforced = unenforced_lines(there)
        return view

    @handles(NodeCalls.nodes)
    def nodes(self, reach: Reach) -> list[NodeView]:
        return [node_view(reach, node) for node in known_nodes(reach.loop)]

    @handles(NodeCalls.node_tree)
    def node_tree(self, reach: Reach, node: str) -> NodeTree:
        known = known_node(reach.loop, node)
        if not isinstance(tree := known.spec.tree, Tree):
            return NodeTree(node=node)
        left = reach.loop.state.rooms[known.index].gpu_milli
        used = [gpu for gpu, milli in enumerate(left) if milli < WHOLE_GPU_MILLI]
        return NodeTree(node=node, lines=tree_lines(tree, used), tree=tree)

    @handles(NodeCalls.change_node)
    async def set_intent(
        self,
        reach: Reach,
        node: str,
        verb: Literal["cordon", "drain", "uncordon"],
        in_ms: Annotated[int, Meta(ge=0, le=ENDS_IN_MS_MAX)] | None = None,
        why: Annotated[str, Meta(max_length=INTENT_WHY_MAX)] = "",
    ) -> Done:
        request: SetIntent | SetEnd = SetIntent(node, INTENTS[verb], reach.name, why)
        if in_ms is not None and verb != "drain":
            raise Refusal(422, "is for drain only", "in_ms")
        if in_ms:
            request = SetEnd(node, reach.loop.clock.now_ms() + in_ms, reach.name, why)
        answer = accepted(await reach.loop.request(request))
        return Done(id=answer.id, note=answer.note)

    @handles(NodeCalls.set_labels)
    async def set_labels(self, reach: Reach, node: str, data: LabelChange) -> Done:
        answer = accepted(await reach.loop.request(SetLabels(node, data, reach.name)))
        return Done(id=answer.id, note=answer.note)

    @handles(NodeCalls.check)
    async def check(self, loop: ControlLoop, node: str) -> CheckView:
        answer = accepted(await loop.request(CheckNode(node)))
        return CheckView(node=node, id=answer.id)

    @handles(NodeCalls.check_result)
    async def check_result(
        self, reach: Reach, node: str, check: str, wait_s: WaitS = 0
    ) -> CheckView:
        loop = reach.loop
        deadline_ms = loop.clock.now_ms() + int(wait_s * 1000)
        while (view := check_view(loop, node, check)) is not None and view.verdict is None:
            left_s = (deadline_ms - loop.clock.now_ms()) / 1000
            if left_s <= 0:
                break
            await reach.loop.changed("", left_s)
        if view is None:
            raise Refusal(404, f"there is no check {check[:64]!r} of {node[:64]!r}", "check")
        return view


class Services:
    @handles(ServiceCalls.services)
    def listing(self, reach: Reach, entry: GatewayEntry) -> list[ServiceView]:
        return [service_view(reach, service, entry) for service in reach.services()]

    @handles(ServiceCalls.service)
    def one(self, reach: Reach, entry: GatewayEntry, name: str) -> ServiceView:
        return service_view(reach, reach.service(name), entry)

    @handles(ServiceCalls.submit_service)
    async def serve(
        self, reach: Reach, entry: GatewayEntry, name: str, data: ServiceSpec
    ) -> ServiceView:
        if data.name != name:
            raise Refusal(422, f"is {data.name!r}, but the URL has {name[:64]!r}", "name")
        for known in reach.services():
            if known.spec.name == name and data.replica == without_keys(known.spec.replica):
                # As it was shown, masks and all: what they hide stays.
                data = msgspec.structs.replace(data, replica=known.spec.replica)
        if reach.who.only:
            data = guest_service(reach, data)
        return await self._set(reach, entry, data)

    @handles(ServiceCalls.roll_back_service)
    async def roll_back(
        self,
        reach: Reach,
        entry: GatewayEntry,
        name: str,
        version: Annotated[int, Meta(ge=0, le=1 << 53)] = 0,
    ) -> ServiceView:
        service = reach.service(name)
        return await self._set(reach, entry, rolled_back(service, version))

    async def _set(self, reach: Reach, entry: GatewayEntry, data: ServiceSpec) -> ServiceView:
        spec = msgspec.structs.replace(data, replica=reach.spec(data.replica))
        _refuse_entry(reach, entry, spec)
        refuse_unknown_package(reach, spec.replica.package)
        refuse_unknown_secrets(reach.loop, spec.replica)
        refuse_unknown_certificate(reach.loop, spec)
        if spec.clusters:
            refuse_unknown_clusters(reach.loop, spec)
        accepted(await reach.loop.request(SetService(spec, reach.name, reach.tenant)))
        await reach.loop.settled()
        return service_view(reach, reach.service(spec.name), entry)

    @handles(ServiceCalls.stop_service)
    async def stop(self, reach: Reach, name: str) -> Done:
        reach.service(name)
        request = StopService(name, reach.name, reach.tenant)
        answer = accepted(await reach.loop.request(request))
        return Done(id=answer.id, note=answer.note)

    @handles(ServiceCalls.set_service_sites)
    async def set_sites(self, reach: Reach, name: str, data: Doors) -> DoorView:
        return await tell_sites(reach, name, data)


def _refuse_entry(reach: Reach, entry: GatewayEntry, spec: ServiceSpec) -> None:
    """What belongs to the gateway or its head; the gateway refuses it again."""
    if spec.way.port == entry.port:
        message = f"{entry.port} is the port that all services share; choose another"
        raise Refusal(422, message, "port")
    owner = owner_of(reach.loop.state, spec.replica.tenant)
    problem = problem_with_names(entry, spec.way, owner)
    if problem is not None:
        field, _, message = problem.partition(": ")
        raise Refusal(422, message, field)


ROUTES: list[type | Handler] = [
    Cluster,
    HeadsOfCluster,
    Neighbors,
    Offers,
    Events,
    Jobs,
    Logs,
    Sessions,
    Files,
    Handed,
    Annotations,
    Services,
    Trying,
    Workflows,
    Schedules,
    Series,
    Ledger,
    Budgets,
    Policies,
    Previews,
    StatusPages,
    Supplies,
    Trials,
    FabricApi,
    StorageApi,
    Packages,
    Secrets,
    Rules,
    Explanations,
    Me,
    Tenants,
    Users,
    Invites,
    Tokens,
    ApiKeys,
    Join,
    Keys,
    Audit,
    Meeting,
    NodeLink,
    metrics,
    *HANDLERS,
]


def build(
    loop: ControlLoop,
    token: str,
    entry: Callable[[], GatewayEntry] = lambda: GatewayEntry(),
    history: History | None = None,
    live_ledger: LiveLedger | None = None,
    home: Path | None = None,
    names: Collection[str] = (),
    reach: str = "",
    linked: LinkedEngine | None = None,
    stores: Stores | None = None,
) -> App:
    """`reach` is the URL at which nodes reach the head, if it has one for them. `linked` takes
    their links. Without `stores`, everything is in files of the home."""
    if stores is None and home is not None:
        stores = Stores(Home(home))
    kept = history or History(loop)
    auditor = audited(stores, loop)
    access, feed = (
        Access(token, loop.clock.now_ms, names, lambda: loop.state.identity, loop.settled),
        Feed(loop, lambda: kept.newest),
    )
    loop.people_changed = access.watcher.look
    if isinstance(loop.files, FileDesk):
        loop.files.part = partial(part_of, loop, loop.files.store)
    meetings, tries, moments = Meetings(urls_of(reach)), Tries(entry), Moments(home)

    def entry_of(connection: Connection) -> GatewayEntry:
        return entry_for(connection.scope) or entry()

    app = App(
        ROUTES,
        access,
        {
            "loop": lambda _: loop,
            "wanted": Asked(provide_wanted),
            "entry": entry_of,
            "live_ledger": lambda _: live_ledger,
            "history": lambda _: kept,
            "meetings": lambda _: meetings,
            "moments": lambda _: moments,
            "tries": lambda _: tries,
            "stores": lambda _: stores,
            "linked": lambda _: linked,
            "auditor": lambda _: auditor,
            **provided(loop, access, feed, home, stores),
        },
        audit=auditor,
        check=lambda: loop.check(),  # a head that begins to lead gets another
        settled=loop.settled,
        ahead=partial(read_ahead, loop),
        state=State({"feed": feed, ACCESS: access, MOMENTS: moments}),
    )
    app.state[SERVED] = headed(app, token, lambda: loop.last_seq)
    if linked is not None:
        linked.heads = lambda: head_urls(app)
    return app
