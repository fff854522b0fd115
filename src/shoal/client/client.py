"""A typed client of the API. Threads may share it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Literal, Self

from shoal.calls.call import declared
from shoal.calls.cluster import ClusterCalls, NodeCalls, ServiceCalls
from shoal.calls.jobs import FlowCalls, JobCalls
from shoal.calls.people import NoticeCalls, PeopleCalls, SecretCalls
from shoal.client import contexts, transport
from shoal.client.caller import Caller
from shoal.client.transport import Endpoint, ShoalError
from shoal.model.node import NodeIntent
from shoal.model.views import Done, PackageView

NOT_FOUND = 404
VERBS: dict[NodeIntent, Literal["cordon", "drain", "uncordon"]] = {
    NodeIntent.OPEN: "uncordon",
    NodeIntent.CORDONED: "cordon",
    NodeIntent.DRAINING: "drain",
}


def default_home() -> Path:
    return Path(os.environ.get("SHOAL_HOME") or Path.home() / ".shoal").absolute()


def _endpoint(context: str) -> Endpoint:
    variables = (os.environ.get(name, "") for name in ("SHOAL_CONTEXT", "SHOAL_HOME"))
    name = context or contexts.choose(*variables).name
    return transport.at_home(default_home()) if name == contexts.LOCAL else contexts.endpoint(name)


class Client(
    Caller,
    JobCalls,
    FlowCalls,
    ServiceCalls,
    NodeCalls,
    ClusterCalls,
    PeopleCalls,
    SecretCalls,
    NoticeCalls,
):
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

    def drain_in(self, node: str, in_ms: int, why: str = "") -> Done:
        """Have the node free after this time."""
        return self.change_node(node, "drain", in_ms=in_ms, why=why)

    def set_intent(self, node: str, intent: NodeIntent, why: str = "") -> Done:
        """OPEN, CORDONED or DRAINING. `why` is kept in the node's history."""
        return self.change_node(node, VERBS[intent], why=why)

    def has_package(self, package: str) -> bool:
        try:
            self.package(package)
        except ShoalError as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    def send_package(self, package: str, size: int, file: IO[bytes]) -> None:
        """Sends a packed working directory, unless the controller has it already."""
        if not self.has_package(package):
            file.seek(0)
            call = declared(JobCalls.put_package)
            path = call.request((package, b""), {}).path
            headers = {"Content-Type": "application/x-tar", "Content-Length": str(size)}
            self.request(call.method, path, PackageView, file, headers)

    def page_link(self) -> str:
        """The page's address, with a code that signs in once within two minutes."""
        return f"{self.url}/#code={self.page_code().code}"

    def join_token(self) -> str:
        """With it, machines join; for admins."""
        return self.join_key().token
