"""A typed client of the API. Threads may share it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

import msgspec

from shoal import contexts, transport
from shoal.caller import Caller
from shoal.client_files import FileCalls
from shoal.client_flows import FlowCalls
from shoal.client_identity import IdentityCalls
from shoal.client_notices import NoticeCalls, query_of
from shoal.client_secrets import SecretCalls
from shoal.model.explanation import Explanation
from shoal.model.fabric_views import FabricView, NetworkRequest
from shoal.model.finding import EVERY_JOB, JobFilter
from shoal.model.given import given
from shoal.model.job import JobSpec
from shoal.model.joining import JoinTokenView
from shoal.model.ledger import By, CostView, LedgerView
from shoal.model.node import LabelChange, NodeIntent
from shoal.model.policy import Policy
from shoal.model.prices import PriceList
from shoal.model.samples import NodeSample
from shoal.model.series import JobSeries, NodeSeries, ServiceSeries
from shoal.model.service import ServiceSpec
from shoal.model.session import SessionRequest, SessionView
from shoal.model.storage import StorageRequest, StorageView
from shoal.model.supply_views import SuppliesView
from shoal.model.views import (
    CheckView,
    Done,
    EventsView,
    HeadView,
    JobRow,
    JobView,
    LogView,
    NodeView,
    PackageView,
    ServiceView,
    StatusView,
    WhyView,
)
from shoal.transport import SOCKET_NAME, Address, Endpoint, ShoalError, Unreachable

__all__ = ["SOCKET_NAME", "Address", "Client", "ShoalError", "Unreachable", "default_home"]

NOT_FOUND = 404


class PageCode(msgspec.Struct, frozen=True):
    code: str


def default_home() -> Path:
    return Path(os.environ.get("SHOAL_HOME") or Path.home() / ".shoal").absolute()


def _endpoint(context: str) -> Endpoint:
    variables = (os.environ.get(name, "") for name in ("SHOAL_CONTEXT", "SHOAL_HOME"))
    name = context or contexts.choose(*variables).name
    return transport.at_home(default_home()) if name == contexts.LOCAL else contexts.endpoint(name)


class Client(Caller, FlowCalls, IdentityCalls, SecretCalls, FileCalls, NoticeCalls):
    """A cluster: by `url` and `token` (and `certificate`, if the system does not trust it), by the
    `home` of a cluster on this machine, or by a `context` that `shoal login` made. Without any, the
    cluster that the `shoal` command would use. `url` may name several heads, with commas. While no
    controller can be reached, a call is repeated for `patience_s`. That is safe for every call: a
    submission carries a key."""

    def __init__(
        self,
        url: str = "",
        token: str = "",
        *,
        home: Path | str | None = None,
        context: str = "",
        certificate: str = "",
        timeout_s: float = 60,
        patience_s: float = 3,
    ) -> None:
        if url:
            endpoint = transport.at_any(url, token, certificate)
        elif home is not None:
            endpoint = transport.at_home(Path(home))
        else:
            endpoint = _endpoint(context)
        super().__init__(endpoint, timeout_s, patience_s)

    @classmethod
    def at_home(cls, home: Path | None = None, *, patience_s: float = 3) -> Self:
        return cls(home=home or default_home(), patience_s=patience_s)

    @classmethod
    def to(cls, endpoint: Endpoint, *, timeout_s: float = 60, patience_s: float = 3) -> Self:
        """The controller that another client uses."""
        made = cls.__new__(cls)
        Caller.__init__(made, endpoint, timeout_s, patience_s)
        return made

    def status(self) -> StatusView:
        return self._call("GET", StatusView, "status")

    def nodes(self) -> list[NodeView]:
        return self._call("GET", list[NodeView], "nodes")

    def drain_in(self, node: str, in_ms: int, why: str = "") -> Done:
        """Have the node free after this time."""
        return self._call("POST", Done, "nodes", node, "drain", in_ms=in_ms, **_said(why))

    def set_intent(self, node: str, intent: NodeIntent, why: str = "") -> Done:
        """OPEN, CORDONED or DRAINING. `why` is kept in the node's history."""
        verb = {"open": "uncordon", "cordoned": "cordon", "draining": "drain"}[intent.value]
        return self._call("POST", Done, "nodes", node, verb, **_said(why))

    def set_labels(self, node: str, change: LabelChange) -> Done:
        """Sets and removes labels and taints of a node."""
        body = msgspec.json.encode(change)
        return self._call("POST", Done, "nodes", node, "labels", body=body)

    def submit_service(self, spec: ServiceSpec) -> ServiceView:
        """Starts the service, or rolls the new version out without a failed request."""
        return self._call("PUT", ServiceView, "services", spec.name, body=msgspec.json.encode(spec))

    def open_session(self, job_id: str, request: SessionRequest) -> SessionView:
        """Have the member's node enter a meeting that we hold: see shoal.sessions."""
        body = msgspec.json.encode(request)
        return self._call("POST", SessionView, "jobs", job_id, "sessions", body=body)

    def services(self) -> list[ServiceView]:
        return self._call("GET", list[ServiceView], "services")

    def service(self, name: str) -> ServiceView:
        return self._call("GET", ServiceView, "services", name)

    def roll_back_service(self, name: str, *, version: int = 0) -> ServiceView:
        """Rolls the version before out again. `version`: refuse if that is another one by now."""
        return self._call("POST", ServiceView, "services", name, "rollback", version=version)

    def stop_service(self, name: str) -> Done:
        """Returns at once; the replicas finish their requests first."""
        return self._call("POST", Done, "services", name, "stop")

    def check(self, node: str) -> CheckView:
        """Starts measuring the node; `check_result` returns the verdict."""
        return self._call("POST", CheckView, "nodes", node, "check")

    def check_result(self, node: str, check: str, *, wait_s: float = 0) -> CheckView:
        """Returns when there is a verdict, or after `wait_s` (30 at most)."""
        return self._call("GET", CheckView, "nodes", node, "checks", check, wait_s=wait_s)

    def check_network(self, nodes: Sequence[str] = (), *, collectives: bool = False) -> FabricView:
        """Starts measuring the network; `tour` returns what was found."""
        body = msgspec.json.encode(NetworkRequest(nodes=list(nodes), collectives=collectives))
        return self._call("POST", FabricView, "fabric", "check", body=body)

    def tour(self, tour: str, *, wait_s: float = 0) -> FabricView:
        """Returns when the tour has ended, or after `wait_s` (30 at most)."""
        return self._call("GET", FabricView, "fabric", "tours", tour, wait_s=wait_s)

    def fabric(self) -> FabricView:
        """The last tour that has ended; without an id if there was none."""
        return self._call("GET", FabricView, "fabric")

    def check_storage(self, request: StorageRequest) -> StorageView:
        """Starts measuring a storage; `storage_check` returns what was found."""
        body = msgspec.json.encode(request)
        return self._call("POST", StorageView, "storage", "check", body=body)

    def storage_check(self, check: str, *, wait_s: float = 0) -> StorageView:
        """Returns when it has ended, or after `wait_s` (30 at most)."""
        return self._call("GET", StorageView, "storage", "checks", check, wait_s=wait_s)

    def policy(self) -> Policy:
        return self._call("GET", Policy, "policy")

    def set_policy(self, policy: Policy) -> Policy:
        return self._call("PUT", Policy, "policy", body=msgspec.json.encode(policy))

    def submit(self, spec: JobSpec, key: str = "") -> JobView:
        """The same key again returns the same job."""
        body = msgspec.json.encode({"spec": given(spec), "key": key or secrets.token_hex(16)})
        return self._call("POST", JobView, "jobs", body=body)

    def has_package(self, package: str) -> bool:
        try:
            self._call("GET", PackageView, "packages", package)
        except ShoalError as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    def send_package(self, package: str, size: int, file: IO[bytes]) -> None:
        """Sends a packed working directory, unless the controller has it already."""
        if not self.has_package(package):
            file.seek(0)
            headers = {"Content-Type": "application/x-tar", "Content-Length": str(size)}
            self._call("PUT", PackageView, "packages", package, body=file, headers=headers)

    def jobs(
        self,
        *,
        finished: bool = False,
        limit: int = 100,
        before: str = "",
        wanted: JobFilter = EVERY_JOB,
    ) -> list[JobRow]:
        """Live jobs in the order of the queue; with `finished`, then the others, newest first.
        `wanted` leaves out jobs that do not match. `before` gives the next page: the finished jobs
        that ended before this one. An array is one row; `wanted.array` lists its elements."""
        query = {"finished": str(finished).lower(), "limit": limit, **query_of(wanted)}
        query |= {"before": before} if before else {}
        return self._call("GET", list[JobRow], "jobs", **query)

    def job(self, job_id: str, *, wait_for: str = "", wait_s: float = 0) -> JobView:
        """With `wait_for` ("running", "asleep" or "finished") it returns when the job has reached
        that state, or after `wait_s` (30 at most): look at the state."""
        query: dict[str, Any] = {"wait_for": wait_for, "wait_s": wait_s} if wait_for else {}
        return self._call("GET", JobView, "jobs", job_id, **query)

    def cancel(self, job_id: str) -> Done:
        return self._call("POST", Done, "jobs", job_id, "cancel")

    def sleep(self, job_id: str) -> Done:
        """Puts a running job to sleep: it holds memory of its nodes, and no GPU and no CPU. Returns
        at once; `job(job_id, wait_for="asleep", wait_s=30)` waits."""
        return self._call("POST", Done, "jobs", job_id, "sleep")

    def wake(self, job_id: str) -> Done:
        """Wakes a job as soon as there is room: it goes on where it stopped. Returns at once."""
        return self._call("POST", Done, "jobs", job_id, "wake")

    def requeue(self, job_id: str, key: str = "") -> Done:
        """Stops the job and runs it again. A job that has ended is submitted again, as a new job
        and once for each key."""
        return self._call("POST", Done, "jobs", job_id, "requeue", key=key or secrets.token_hex(16))

    def retry(self, job_id: str) -> Done:
        """Runs elements of an array again that ended without success: one (j7.3), or all (j7)."""
        return self._call("POST", Done, "jobs", job_id, "retry")

    def page_link(self) -> str:
        """The page's address, with a code that signs in once within two minutes."""
        return f"{self.url}/#code={self._call('POST', PageCode, 'session', 'code').code}"

    def why(self, job_id: str) -> WhyView:
        return self._call("GET", WhyView, "jobs", job_id, "why")

    def logs(
        self,
        job_id: str,
        *,
        member: int = 0,
        attempt: int = 0,
        offset: int = 0,
        wait_s: float = 0,
        grep: str = "",
        since_ms: int = 0,
    ) -> LogView:
        """Output from `offset` on; a negative one counts from the end. Attempt 0 is the newest.
        If there is nothing yet, it waits up to `wait_s` for more."""
        query: dict[str, Any] = {
            "member": member,
            "attempt": attempt,
            "offset": offset,
            "wait_s": wait_s,
        }
        query |= {"grep": grep} if grep else {}
        query |= {"since_ms": since_ms} if since_ms else {}
        return self._call("GET", LogView, "jobs", job_id, "logs", **query)

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
        query: dict[str, Any] = {
            "after": after,
            "limit": limit,
            "job": job,
            "node": node,
            "wait_s": wait_s,
        }
        query["notable"] = str(notable).lower()
        query |= query_of(wanted)
        return self._call("GET", EventsView, "events", **query)

    def explanation(self, job_id: str) -> Explanation:
        """What happened to the job: attempts, causes, the last lines of the first failure, cost."""
        return self._call("GET", Explanation, "jobs", job_id, "explanation")

    def job_series(self, job_id: str, *, since_ms: int = 0) -> JobSeries:
        """The job's curves; `since_ms` leaves out older points."""
        return self._call("GET", JobSeries, "jobs", job_id, "series", since_ms=since_ms)

    def samples(self) -> dict[str, NodeSample]:
        """How busy each node and its GPUs were a moment ago, where that is known."""
        return self._call("GET", dict[str, NodeSample], "samples")

    def node_series(self, node: str, *, since_ms: int = 0) -> NodeSeries:
        return self._call("GET", NodeSeries, "nodes", node, "series", since_ms=since_ms)

    def service_series(self, name: str, *, since_ms: int = 0) -> ServiceSeries:
        return self._call("GET", ServiceSeries, "services", name, "series", since_ms=since_ms)

    def ledger(self, *, by: By = By.ACCOUNT, from_ms: int = 0, to_ms: int = 0) -> LedgerView:
        """Where GPU time went; `to_ms` 0 is now."""
        return self._call("GET", LedgerView, "ledger", by=by.value, from_ms=from_ms, to_ms=to_ms)

    def cost(self, job_id: str) -> CostView:
        return self._call("GET", CostView, "jobs", job_id, "cost")

    def heads(self) -> list[HeadView]:
        return self._call("GET", list[HeadView], "heads")

    def forget_head(self, name: str) -> Done:
        return self._call("DELETE", Done, "heads", name)

    def join_token(self) -> str:
        """With it, machines join; for admins."""
        return self._call("GET", JoinTokenView, "keys", "join").token

    def supply(self) -> SuppliesView:
        return self._call("GET", SuppliesView, "supply")

    def prices(self) -> PriceList:
        return self._call("GET", PriceList, "prices")

    def set_prices(self, prices: PriceList) -> PriceList:
        return self._call("PUT", PriceList, "prices", body=msgspec.json.encode(prices))


def _said(why: str) -> dict[str, Any]:
    """Only if there is something: the head may be of an earlier release."""
    return {"why": why} if why else {}
