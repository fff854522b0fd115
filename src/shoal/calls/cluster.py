"""Calls about the cluster: nodes, services, events, the policy, the ledger, heads and supplies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from shoal.calls.call import Calls, Head, Needs, call
from shoal.model.fabric import FabricView, NetworkRequest
from shoal.model.finding import EVERY_JOB, JobFilter
from shoal.model.ledger import By, LedgerView, PriceList
from shoal.model.node import LabelChange
from shoal.model.policy import Policy
from shoal.model.preview import Action, PreviewView
from shoal.model.series import NodeSample, NodeSeries, ServiceSeries
from shoal.model.service import ServiceSpec
from shoal.model.sites import Doors, DoorView
from shoal.model.status_page import StatusPage
from shoal.model.storage import StorageRequest, StorageView
from shoal.model.supply import SuppliesView
from shoal.model.tree import NodeTree
from shoal.model.views import CheckView, Done, HeadView, NodeView, ServiceView, StatusView

if TYPE_CHECKING:
    from shoal.calls.histories import EventsView, SharedView
    from shoal.model.neighbor_views import GoneView, NeighborView, NewNeighbor
    from shoal.model.offers import OffersView


class ClusterCalls(Calls):
    @call("GET", "/v1/status", Needs.READ)
    def status(self) -> StatusView:
        """The cluster in one screen: nodes, GPUs, jobs, alarms."""

    @call("GET", "/v1/events", Needs.READ, head=Head.LOG, late="shoal.calls.histories")
    def events(
        self,
        *,
        after: int = 0,
        limit: int = 1000,
        job: str = "",
        node: str = "",
        notable: bool = False,
        wait_s: float = 0,
        wanted: JobFilter = EVERY_JOB,
    ) -> EventsView:
        """Events after a sequence number, oldest first; a negative `after` gives the last ones.
        `notable` leaves out frequent ones: submissions, exits of members, checkpoints. `wanted`
        leaves only events of jobs that match, and later than its `since_ms`."""

    @call("GET", "/v1/preview/{action}", Needs.READ)
    def preview(
        self,
        action: Action,
        names: Sequence[str],
        *,
        version: int = 0,
        least: int = 0,
        most: int = 0,
    ) -> PreviewView:
        """What an action on these nodes (drain, cordon, uncordon), jobs (cancel, requeue) or this
        service (stop, rollback, scale) would do now. Nothing is changed. `version`: of the service
        to go back to; `least`, `most`: its number of replicas."""

    @call("GET", "/v1/policy", Needs.READ)
    def policy(self) -> Policy:
        """The policy in force."""

    @call("PUT", "/v1/policy", Needs.ADMIN, body="policy")
    def set_policy(self, policy: Policy, *, expected: str = "") -> Policy:
        """Tries the policy out, then sets it: in force when this returns. `expected`: refused with
        409 if the version in force is another one by then."""

    @call("GET", "/v1/ledger", Needs.READ)
    def ledger(
        self,
        *,
        by: By = By.ACCOUNT,
        from_ms: int = 0,
        to_ms: int = 0,
        tenant: str | None = None,
        user: str | None = None,
    ) -> LedgerView:
        """Where GPU time went, in whole hours (UTC); `to_ms` 0 is now, `from_ms` 0 the beginning.
        By job, node, user or tenant: the 1,000 largest rows, and one for all others. A sender who
        sees one tenant gets what that tenant's jobs used. `tenant`, `user`: only what their jobs
        used; empty: jobs without one."""

    @call("GET", "/v1/prices", Needs.READ)
    def prices(self) -> PriceList:
        """The prices by which the ledger counts."""

    @call("PUT", "/v1/prices", Needs.ADMIN, body="prices")
    def set_prices(self, prices: PriceList) -> PriceList:
        """Sets the prices at once, for the past too."""

    @call("GET", "/v1/status-page", Needs.ADMIN)
    def status_page(self) -> StatusPage:
        """What the public status page at /status shows, and whether there is one."""

    @call("PUT", "/v1/status-page", Needs.ADMIN, body="page")
    def set_status_page(self, page: StatusPage) -> StatusPage:
        """Switches the public status page on or off, and says which services it names."""

    @call("GET", "/v1/supply", Needs.READ_ALL)
    def supply(self) -> SuppliesView:
        """Supplies of the policy, and those that it no longer has but that still bring nodes."""

    @call("POST", "/v1/offers", Needs.WRITE, body="specs", late="shoal.model.offers", neighbor=True)
    def offers(self, specs: list[Any]) -> OffersView:
        """When each of these jobs would start here if the sender submitted it now, and at which
        price. A spec is one of a submission; at most 32. Nothing is changed."""

    @call("GET", "/v1/neighbors", Needs.READ, late="shoal.model.neighbor_views")
    def neighbors(self) -> list[NeighborView]:
        """Other clusters to which jobs may go: what they offer, and what of ours is there."""

    @call("GET", "/v1/neighbors/shared", Needs.READ, late="shoal.calls.histories")
    def shared_with_neighbors(self) -> SharedView:
        """This cluster's side: its price, who may send jobs, what was moved lately and why."""

    @call(
        "PUT",
        "/v1/neighbors/{name}",
        Needs.ADMIN,
        body="wanted",
        late="shoal.model.neighbor_views",
    )
    def set_neighbor(self, name: str, wanted: NewNeighbor) -> NeighborView:
        """Adds a neighbor, if it answers and accepts the token; or changes its URL and token."""

    @call("GET", "/v1/neighbors/{name}/gone", Needs.ADMIN, late="shoal.model.neighbor_views")
    def neighbor_gone(self, name: str) -> GoneView:
        """What it would mean to declare a neighbor gone."""

    @call("DELETE", "/v1/neighbors/{name}", Needs.ADMIN)
    def remove_neighbor(self, name: str, *, gone: bool = False) -> Done:
        """Forgets a neighbor that has no job of ours. `gone`: it will never answer again, so that
        our jobs there wait here again, though they may still run there."""

    @call("GET", "/v1/heads", Needs.READ, head=Head.ANY)
    def heads(self) -> list[HeadView]:
        """The heads of the cluster; empty without a database."""

    @call("DELETE", "/v1/heads/{name}", Needs.ADMIN)
    def forget_head(self, name: str) -> Done:
        """Forgets a head that will not come back."""


class NodeCalls(Calls):
    @call("GET", "/v1/nodes", Needs.READ)
    def nodes(self) -> list[NodeView]:
        """All nodes."""

    @call("POST", "/v1/nodes/{node}/{verb}", Needs.ADMIN)
    def change_node(
        self,
        node: str,
        verb: Literal["cordon", "drain", "uncordon"],
        *,
        in_ms: int | None = None,
        why: str = "",
    ) -> Done:
        """Cordons, drains or reopens a node. `in_ms`: drain it so that it is free after this time.
        `why` is kept in the node's history."""

    @call("POST", "/v1/nodes/{node}/labels", Needs.ADMIN, body="change")
    def set_labels(self, node: str, change: LabelChange) -> Done:
        """Sets and removes labels and taints of a node."""

    @call("POST", "/v1/nodes/{node}/check", Needs.ADMIN)
    def check(self, node: str) -> CheckView:
        """Starts measuring the node; `check_result` returns the verdict."""

    @call("GET", "/v1/nodes/{node}/checks/{check}", Needs.READ)
    def check_result(self, node: str, check: str, *, wait_s: float = 0) -> CheckView:
        """Returns when there is a verdict, or after `wait_s` (30 at most)."""

    @call("GET", "/v1/fabric", Needs.READ_ALL)
    def fabric(self) -> FabricView:
        """The last tour of the network that somebody asked for, with what is known now: small tours
        that check a suspect change the conclusions, not the picture. It has no id if there was
        none."""

    @call("POST", "/v1/fabric/check", Needs.ADMIN, body=NetworkRequest)
    def check_network(
        self, nodes: Sequence[str] = (), *, collectives: bool = False, halves: bool = False
    ) -> FabricView:
        """Starts measuring the network; `tour` returns the result. With `halves`: what is carried
        between halves of the nodes at the same moment, instead of each link."""

    @call("GET", "/v1/fabric/tours/{tour}", Needs.READ_ALL)
    def tour(self, tour: str, *, wait_s: float = 0) -> FabricView:
        """Returns when the tour has ended, or after `wait_s` (30 at most)."""

    @call("POST", "/v1/storage/check", Needs.ADMIN, body="request")
    def check_storage(self, request: StorageRequest) -> StorageView:
        """Starts measuring a storage; `storage_check` returns the result."""

    @call("GET", "/v1/storage/checks/{check}", Needs.ADMIN)
    def storage_check(self, check: str, *, wait_s: float = 0) -> StorageView:
        """Returns when it has ended, or after `wait_s` (30 at most). `last` is the last one; it has
        no id if there was none."""

    @call("GET", "/v1/samples", Needs.READ)
    def samples(self) -> dict[str, NodeSample]:
        """How busy each node and its GPUs were a moment ago, where that is known."""

    @call("GET", "/v1/nodes/{node}/tree", Needs.READ)
    def node_tree(self, node: str) -> NodeTree:
        """How a node's GPUs, CPUs and cards are joined."""

    @call("GET", "/v1/nodes/{node}/series", Needs.READ)
    def node_series(self, node: str, *, since_ms: int = 0) -> NodeSeries:
        """The node's curves; `since_ms` leaves out older points."""


class ServiceCalls(Calls):
    @call("GET", "/v1/services", Needs.READ, neighbor=True)
    def services(self) -> list[ServiceView]:
        """All services that the sender may see."""

    @call("GET", "/v1/services/{name}", Needs.READ, neighbor=True)
    def service(self, name: str) -> ServiceView:
        """A service and its replicas."""

    @call("PUT", "/v1/services/{name}", Needs.WRITE, body="spec", neighbor=True)
    def submit_service(self, spec: ServiceSpec) -> ServiceView:
        """Starts the service, or rolls the new version out without a failed request."""

    @call("POST", "/v1/services/{name}/rollback", Needs.WRITE)
    def roll_back_service(self, name: str, *, version: int = 0) -> ServiceView:
        """Rolls an earlier version out again: the newest other one, or `version`, one of the last
        ten that were ready. The scale stays as it is."""

    @call("POST", "/v1/services/{name}/stop", Needs.WRITE, neighbor=True)
    def stop_service(self, name: str) -> Done:
        """Returns at once; the replicas finish their requests first."""

    @call("PUT", "/v1/services/{name}/sites", Needs.WRITE, body="doors", neighbor=True)
    def set_service_sites(self, name: str, doors: Doors) -> DoorView:
        """For a service of a neighbor: in which other clusters it is, and where their gateways are
        called. Returns where this one is."""

    @call("GET", "/v1/services/{name}/series", Needs.READ)
    def service_series(self, name: str, *, since_ms: int = 0) -> ServiceSeries:
        """The service's curves; `since_ms` leaves out older points."""
