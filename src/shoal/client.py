"""A typed client of the API, over one kept-alive connection."""

from __future__ import annotations

import http.client
import os
import secrets
import socket
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from shoal.files import read_own, require_own, short_path
from shoal.model.explanation import Explanation
from shoal.model.job import JobSpec
from shoal.model.ledger import By, CostView, LedgerView
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy
from shoal.model.prices import PriceList
from shoal.model.samples import NodeSample
from shoal.model.series import JobSeries, NodeSeries, ServiceSeries
from shoal.model.service import ServiceSpec
from shoal.model.views import (
    CheckView,
    Done,
    EventsView,
    JobRow,
    JobView,
    LogView,
    NodeView,
    PackageView,
    Problem,
    ServiceView,
    StatusView,
    Submission,
    WhyView,
)

Answer = TypeVar("Answer")

SOCKET_NAME = "controller.sock"
CREDENTIALS = struct.Struct("3i")  # process, user, group
RETRY_PAUSE_S = 0.1
NOT_FOUND = 404


class ShoalError(Exception):
    """A refusal or failure with a message that a user can act on."""

    def __init__(self, message: str, field: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.status = status

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class Unreachable(ShoalError):
    """No controller answers there."""


class Address(msgspec.Struct, frozen=True):
    """Where a running controller is found; it writes this into its home when it is ready. `socket`
    is for the user's own programs on this machine, `url` for browsers and other machines."""

    url: str
    pid: int
    socket: str = ""


class PageCode(msgspec.Struct, frozen=True):
    code: str


def default_home() -> Path:
    return Path(os.environ.get("SHOAL_HOME") or Path.home() / ".shoal").absolute()


class _Local(http.client.HTTPConnection):
    """To the socket file of a home, if it is ours or root's process that listens there."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            with short_path(self._path) as path:
                self.sock.connect(path)
            self._refuse_strangers()
        except BaseException:
            self.close()
            raise

    def _refuse_strangers(self) -> None:
        told = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        owner = CREDENTIALS.unpack(told)[1]
        if owner not in (0, os.geteuid()):
            raise Unreachable(f"{self._path} is held by another user (uid {owner})")


class Client:
    """`patience_s`: how long to try again while the controller cannot be reached, for calls that
    are safe to repeat. All are: a submission carries a key."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 60, patience_s: float = 0):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ShoalError(f"{url!r} is not an address like http://127.0.0.1:7700")
        self.url = url
        self._host, self._port = parts.hostname, parts.port or 80
        self._socket: Path | None = None  # a port may be anybody's while no controller listens
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._connection: http.client.HTTPConnection | None = None

    @classmethod
    def at_home(cls, home: Path | None = None, *, patience_s: float = 3) -> Client:
        """The cluster of this user on this machine, as `shoal up` left its address and token."""
        home = home or default_home()
        try:
            require_own(home)
            address = msgspec.json.decode(read_own(home / "controller.json"), type=Address)
            token = read_own(home / "token").decode().strip()
        except FileNotFoundError:
            message = f"no cluster is up in {home}; start one with: shoal up"
            raise Unreachable(message) from None
        except PermissionError as error:
            raise Unreachable(f"cannot use {error.filename}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            message = f"{home}/controller.json is damaged; mend it with: shoal up"
            raise Unreachable(message) from None
        if not token:
            raise Unreachable(f"{home}/token is empty; mend it with: shoal down, then shoal up")
        if not address.socket:
            message = f"the cluster in {home} was started by another version of shoal"
            raise Unreachable(f"{message}; start it again with: shoal down, then shoal up")
        client = cls(address.url, token, patience_s=patience_s)
        client._socket = home / SOCKET_NAME  # beside the token, wherever the home is by now
        return client

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the verbs ------------------------------------------------------------------------

    def status(self) -> StatusView:
        return self._call("GET", "/v1/status", StatusView)

    def nodes(self) -> list[NodeView]:
        return self._call("GET", "/v1/nodes", list[NodeView])

    def set_intent(self, node: str, intent: NodeIntent) -> Done:
        """OPEN, CORDONED or DRAINING."""
        verb = {"open": "uncordon", "cordoned": "cordon", "draining": "drain"}[intent.value]
        return self._call("POST", f"/v1/nodes/{quote(node, safe='')}/{verb}", Done)

    def serve(self, spec: ServiceSpec) -> ServiceView:
        """Serve it so: started, or rolled out over what it was, without a failed request."""
        return self._call(
            "PUT",
            f"/v1/services/{quote(spec.name, safe='')}",
            ServiceView,
            msgspec.json.encode(spec),
        )

    def services(self) -> list[ServiceView]:
        return self._call("GET", "/v1/services", list[ServiceView])

    def service(self, name: str) -> ServiceView:
        return self._call("GET", f"/v1/services/{quote(name, safe='')}", ServiceView)

    def stop_service(self, name: str) -> Done:
        """Replicas finish what they have; returns at once."""
        return self._call("POST", f"/v1/services/{quote(name, safe='')}/stop", Done)

    def check(self, node: str) -> CheckView:
        """Have the node measured; ask `check_result` for the answer."""
        return self._call("POST", f"/v1/nodes/{quote(node, safe='')}/check", CheckView)

    def check_result(self, node: str, check: str, *, wait_s: float = 0) -> CheckView:
        """The answer comes when there is a verdict, or when `wait_s` (30 at most) has passed."""
        query = urlencode({"wait_s": wait_s})
        path = f"/v1/nodes/{quote(node, safe='')}/checks/{quote(check, safe='')}?{query}"
        return self._call("GET", path, CheckView)

    def policy(self) -> Policy:
        return self._call("GET", "/v1/policy", Policy)

    def set_policy(self, policy: Policy) -> Policy:
        return self._call("PUT", "/v1/policy", Policy, msgspec.json.encode(policy))

    def submit(self, spec: JobSpec, key: str = "") -> JobView:
        body = msgspec.json.encode(Submission(spec=spec, key=key or secrets.token_hex(16)))
        return self._call("POST", "/v1/jobs", JobView, body)

    def has_package(self, package: str) -> bool:
        try:
            self._call("GET", f"/v1/packages/{quote(package, safe='')}", PackageView)
        except ShoalError as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    def send_package(self, package: str, size: int, file: IO[bytes]) -> None:
        """A packed working directory, if the controller has not got it yet."""
        if not self.has_package(package):
            file.seek(0)
            headers = {"Content-Type": "application/x-tar", "Content-Length": str(size)}
            path = f"/v1/packages/{quote(package, safe='')}"
            self._call("PUT", path, PackageView, file, headers)

    def jobs(self, *, finished: bool = False, limit: int = 100) -> list[JobRow]:
        """Live jobs in the order of the queue; with `finished`, those too, newest first, after."""
        query = {"finished": str(finished).lower(), "limit": limit}
        return self._call("GET", f"/v1/jobs?{urlencode(query)}", list[JobRow])

    def job(self, job_id: str, *, wait_for: str = "", wait_s: float = 0) -> JobView:
        """With `wait_for` ("running" or "finished") the answer comes when that is so, or when
        `wait_s` (30 at most) has passed: look at the state that it tells."""
        query = {"wait_for": wait_for, "wait_s": wait_s} if wait_for else {}
        path = f"/v1/jobs/{quote(job_id, safe='')}"
        return self._call("GET", f"{path}?{urlencode(query)}" if query else path, JobView)

    def cancel(self, job_id: str) -> Done:
        return self._call("POST", f"/v1/jobs/{quote(job_id, safe='')}/cancel", Done)

    def requeue(self, job_id: str, key: str = "") -> Done:
        """Have it stopped and run again; one that has ended is submitted again, as a new job, and
        only once for one key."""
        query = urlencode({"key": key or secrets.token_hex(16)})
        return self._call("POST", f"/v1/jobs/{quote(job_id, safe='')}/requeue?{query}", Done)

    def page_link(self) -> str:
        """The page's address, with a code that signs in once within two minutes."""
        code = self._call("POST", "/v1/session/code", PageCode).code
        return f"{self.url}/#code={code}"

    def why(self, job_id: str) -> WhyView:
        return self._call("GET", f"/v1/jobs/{quote(job_id, safe='')}/why", WhyView)

    def logs(
        self,
        job_id: str,
        *,
        member: int = 0,
        attempt: int = 0,
        offset: int = 0,
        wait_s: float = 0,
    ) -> LogView:
        """Output from `offset` on (a negative one counts from the end); attempt 0 is the newest.
        Waits up to `wait_s` for more to be written, if there is nothing there."""
        query = {"member": member, "attempt": attempt, "offset": offset, "wait_s": wait_s}
        path = f"/v1/jobs/{quote(job_id, safe='')}/logs?{urlencode(query)}"
        return self._call("GET", path, LogView)

    def events(
        self,
        *,
        after: int = 0,
        limit: int = 1000,
        job: str = "",
        node: str = "",
        notable: bool = False,
        wait_s: float = 0,
    ) -> EventsView:
        """Events after a sequence number, oldest first; a negative `after` gives the last ones.
        `notable` leaves out what comes often: submissions, exits of members, checkpoints."""
        query = {"after": after, "limit": limit, "job": job, "node": node, "wait_s": wait_s}
        if notable:
            query["notable"] = "true"
        return self._call("GET", f"/v1/events?{urlencode(query)}", EventsView)

    def explanation(self, job_id: str) -> Explanation:
        """What happened to it: attempts, causes, the last lines of who failed first, the cost."""
        return self._call("GET", f"/v1/jobs/{quote(job_id, safe='')}/explanation", Explanation)

    def job_series(self, job_id: str, *, since_ms: int = 0) -> JobSeries:
        """Its curves; `since_ms` leaves out the points that are known already."""
        path = f"/v1/jobs/{quote(job_id, safe='')}/series?since_ms={since_ms}"
        return self._call("GET", path, JobSeries)

    def samples(self) -> dict[str, NodeSample]:
        """How busy each node and its GPUs were a moment ago, where they tell."""
        return self._call("GET", "/v1/samples", dict[str, NodeSample])

    def node_series(self, node: str, *, since_ms: int = 0) -> NodeSeries:
        path = f"/v1/nodes/{quote(node, safe='')}/series?since_ms={since_ms}"
        return self._call("GET", path, NodeSeries)

    def service_series(self, name: str, *, since_ms: int = 0) -> ServiceSeries:
        path = f"/v1/services/{quote(name, safe='')}/series?since_ms={since_ms}"
        return self._call("GET", path, ServiceSeries)

    def ledger(self, *, by: By = By.ACCOUNT, from_ms: int = 0, to_ms: int = 0) -> LedgerView:
        """Where GPU time went; `to_ms` 0 is now."""
        query = {"by": by.value, "from_ms": from_ms, "to_ms": to_ms}
        return self._call("GET", f"/v1/ledger?{urlencode(query)}", LedgerView)

    def cost(self, job_id: str) -> CostView:
        return self._call("GET", f"/v1/jobs/{quote(job_id, safe='')}/cost", CostView)

    def prices(self) -> PriceList:
        return self._call("GET", "/v1/prices", PriceList)

    def set_prices(self, prices: PriceList) -> PriceList:
        return self._call("PUT", "/v1/prices", PriceList, msgspec.json.encode(prices))

    # -- how ------------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        path: str,
        kind: type[Answer],
        body: bytes | IO[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        deadline = time.monotonic() + self._patience_s
        while True:
            kept = self._connection is not None
            try:
                if body is not None and not isinstance(body, bytes):
                    body.seek(0)
                status, data = self._exchange(method, path, body, headers)
                break
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if kept:  # it may have died unnoticed, long ago: a fresh one tells
                    continue
                if time.monotonic() >= deadline:
                    where = self._socket or self.url
                    message = f"no controller answers at {where} ({error}); try: shoal up"
                    raise Unreachable(message) from None
                time.sleep(RETRY_PAUSE_S)
        if status >= 300:
            raise self._problem(status, data)
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            message = f"{self.url} does not speak the language of this version of shoal: {error}"
            raise ShoalError(message) from None

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | IO[bytes] | None,
        more: dict[str, str] | None,
    ) -> tuple[int, bytes]:
        if self._connection is None:
            if self._socket is not None:
                connection: http.client.HTTPConnection = _Local(self._socket, self._timeout_s)
            else:
                connection = http.client.HTTPConnection(self._host, self._port, self._timeout_s)
            connection.connect()
            self._connection = connection
        headers = self._headers
        if body is not None:
            headers = {**headers, "Content-Type": "application/json", **(more or {})}
        self._connection.request(method, path, body, headers)
        with self._connection.getresponse() as response:
            return response.status, response.read()

    @staticmethod
    def _problem(status: int, data: bytes) -> ShoalError:
        try:
            problem = msgspec.json.decode(data, type=Problem)
        except msgspec.DecodeError:
            problem = Problem(message=f"the controller answered with status {status}")
        return ShoalError(problem.message, problem.field, status)
