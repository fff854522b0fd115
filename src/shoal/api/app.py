"""The HTTP API: its routes, its dependencies and access to it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from litestar import Controller, Litestar, Request
from litestar.datastructures import State
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.params import Parameter
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from litestar.types import ControllerRouterHandler

from shoal import __version__
from shoal.api.access import Access
from shoal.api.audit import Audit, audited
from shoal.api.events import Events
from shoal.api.fabric import FabricApi, StorageApi
from shoal.api.feed import Feed
from shoal.api.files import Files
from shoal.api.finding import Annotations, provide_wanted
from shoal.api.forwarded import ACCESS, SERVED, entry_for, head_urls, headed
from shoal.api.handling import handles
from shoal.api.identity import Me, Tenants, Tokens, Users
from shoal.api.jobs import Explanations, Jobs, WaitS
from shoal.api.joining import HeadsOfCluster, Join, Keys, NodeLink, checked
from shoal.api.ledger import Budgets, Ledger
from shoal.api.logs import Logs
from shoal.api.meeting import Meeting, Meetings, Sessions, urls_of
from shoal.api.metrics import metrics
from shoal.api.moment import MOMENTS, Moments
from shoal.api.notices import Rules
from shoal.api.packages import Packages, refuse_unknown_package
from shoal.api.page import HANDLERS, provided
from shoal.api.policy import Policies
from shoal.api.problems import (
    SAFE_HEADERS,
    Refusal,
    accepted,
    on_busy,
    on_http_error,
    on_recursion,
    on_refusal,
    on_store_error,
    on_unexpected,
)
from shoal.api.quotas import tickets
from shoal.api.reach import Reach
from shoal.api.secrets import Secrets, refuse_unknown_certificate, refuse_unknown_secrets
from shoal.api.series import Series
from shoal.api.supply import Supplies
from shoal.api.try_service import Tries, Trying
from shoal.api.views import (
    check_view,
    known_nodes,
    node_view,
    service_view,
    status_view,
    version_before,
)
from shoal.api.workflows import Schedules, Workflows
from shoal.calls.cluster import ClusterCalls, NodeCalls, ServiceCalls
from shoal.control.history.history import History
from shoal.control.home import Home
from shoal.control.loop import Busy, ControlLoop, Unreadable
from shoal.control.stores import Stores
from shoal.core.features.caps import caps_of
from shoal.core.features.service.serve import owner_of
from shoal.engines.linked.engine import LinkedEngine
from shoal.forms.fields import JOB, SERVICE
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
from shoal.model.service import GatewayEntry, ServiceSpec, problem_with_names
from shoal.model.views import (
    CheckView,
    Done,
    NodeView,
    ServiceView,
    StatusView,
)
from shoal.ports import StoreError

BODY_BYTES_MAX = 4 * 1024 * 1024

ENDS_IN_MS_MAX = 366 * DAY_MS
INTENT_WHY_MAX = 160

INTENTS = {
    "cordon": NodeIntent.CORDONED,
    "drain": NodeIntent.DRAINING,
    "uncordon": NodeIntent.OPEN,
}


class Cluster(Controller):
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

    @handles(NodeCalls.change_node)
    async def set_intent(
        self,
        reach: Reach,
        node: str,
        verb: Literal["cordon", "drain", "uncordon"],
        in_ms: Annotated[int | None, Parameter(ge=0, le=ENDS_IN_MS_MAX)] = None,
        why: Annotated[str, Parameter(max_length=INTENT_WHY_MAX)] = "",
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


class Services(Controller):
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
        return await self._set(reach, entry, data)

    @handles(ServiceCalls.roll_back_service)
    async def roll_back(
        self,
        reach: Reach,
        entry: GatewayEntry,
        name: str,
        version: Annotated[int, Parameter(ge=0, le=1 << 53)] = 0,
    ) -> ServiceView:
        service = reach.service(name)
        known = version_before(service)
        if service.before is None or not known:
            raise Refusal(409, f"{name} has no other version that was ever ready", "service")
        if version not in (0, known):
            raise Refusal(409, f"the version before is {known} by now, not {version}", "version")
        spec = msgspec.structs.replace(service.before, scale=service.spec.scale)
        return await self._set(reach, entry, spec)

    async def _set(self, reach: Reach, entry: GatewayEntry, data: ServiceSpec) -> ServiceView:
        spec = msgspec.structs.replace(data, replica=reach.spec(data.replica))
        _refuse_entry(reach, entry, spec)
        refuse_unknown_package(reach, spec.replica.package)
        refuse_unknown_secrets(reach.loop, spec.replica)
        refuse_unknown_certificate(reach.loop, spec)
        accepted(await reach.loop.request(SetService(spec, reach.name, reach.tenant)))
        await reach.loop.settled()
        return service_view(reach, reach.service(spec.name), entry)

    @handles(ServiceCalls.stop_service)
    async def stop(self, reach: Reach, name: str) -> Done:
        reach.service(name)
        request = StopService(name, reach.name, reach.tenant)
        answer = accepted(await reach.loop.request(request))
        return Done(id=answer.id, note=answer.note)


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


ROUTES: list[ControllerRouterHandler] = [
    Cluster,
    HeadsOfCluster,
    Events,
    Jobs,
    Logs,
    Sessions,
    Files,
    Annotations,
    Services,
    Trying,
    Workflows,
    Schedules,
    Series,
    Ledger,
    Budgets,
    Policies,
    Supplies,
    FabricApi,
    StorageApi,
    Packages,
    Secrets,
    Rules,
    Explanations,
    Me,
    Tenants,
    Users,
    Tokens,
    Join,
    Keys,
    Audit,
    Meeting,
    NodeLink,
    metrics,
    *HANDLERS,
]


class Plain(Litestar):
    """Without its adapters for pydantic and attrs, which it imports if they are installed."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]


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
) -> Litestar:
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
    meetings, tries, moments = Meetings(urls_of(reach)), Tries(entry), Moments(home)

    def provide_ledger() -> LiveLedger | None:
        return live_ledger

    def provide_history() -> History:
        return kept

    def provide_nothing() -> None:
        """`loop` depends on this, so that it is provided last and by itself."""

    async def provide_loop(all_others: None) -> ControlLoop:  # noqa: ARG001
        """Handlers start from the stored state."""
        await loop.settled()
        return loop

    def provide_entry(request: Request[Any, Any, Any]) -> GatewayEntry:
        return entry_for(request.scope) or entry()

    app = Plain(
        route_handlers=ROUTES,
        guards=[access.guard, *([auditor.guard] if auditor else [])],
        before_send=[auditor.before_send] if auditor else [],
        middleware=[checked(lambda: loop.check()), tickets],
        response_headers=SAFE_HEADERS,
        state=State({"feed": feed, ACCESS: access, MOMENTS: moments}),
        dependencies={
            "all_others": Provide(provide_nothing, sync_to_thread=False),
            "loop": Provide(provide_loop),
            "wanted": Provide(provide_wanted, sync_to_thread=False),
            "entry": Provide(provide_entry, sync_to_thread=False),
            "live_ledger": Provide(provide_ledger, sync_to_thread=False),
            "history": Provide(provide_history, sync_to_thread=False),
            "meetings": Provide(lambda: meetings, sync_to_thread=False),
            "moments": Provide(lambda: moments, sync_to_thread=False),
            "tries": Provide(lambda: tries, sync_to_thread=False),
            "stores": Provide(lambda: stores, sync_to_thread=False),
            "linked": Provide(lambda: linked, sync_to_thread=False),
            "auditor": Provide(lambda: auditor, sync_to_thread=False),
            **provided(loop, access, feed, home, stores),
        },
        exception_handlers={
            Refusal: on_refusal,
            Busy: on_busy,
            Unreadable: on_busy,
            StoreError: on_store_error,
            HTTPException: on_http_error,
            RecursionError: on_recursion,
            Exception: on_unexpected,
        },
        logging_config=None,
        request_max_body_size=BODY_BYTES_MAX,
        openapi_config=_openapi(),
    )
    app.state[SERVED] = headed(app, token, lambda: loop.last_seq)
    if linked is not None:
        linked.heads = lambda: head_urls(app)
    return app


def _openapi() -> OpenAPIConfig:
    return OpenAPIConfig(
        title="Shoal",
        version=__version__,
        # Only the JSON: the pages that render a schema load scripts from other hosts.
        render_plugins=[DescribedSchema(path=["/", "/openapi.json"])],
        security=[{"token": []}],
        components=Components(
            security_schemes={"token": SecurityScheme(type="http", scheme="bearer")}
        ),
    )


# The API's schema (OpenAPI): describes the fields of jobs and services as their files do.


# The schemas by the first part of a target, as in `scale.idle_ms`.
PARTS = {"scale": "Scale", "probe": "Probe", "route": "Route", "sweep": "Sweep"}


class DescribedSchema(JsonRenderPlugin):
    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        schemas = openapi_schema["components"]["schemas"]
        for whole, table in (("ServiceSpec", SERVICE), ("JobSpec", JOB)):
            for field in table.values():
                for target in field.targets.split():
                    part, _, name = target.rpartition(".")
                    about = schemas[PARTS[part] if part else whole]["properties"].get(name)
                    if about is not None:
                        about["description"] = f"`{field.name}` in a file: {field.help}"
        return super().render(request, openapi_schema)
