"""A service in two real clusters with TLS between them: it is rolled out from site to site, goes
back everywhere if it fails at one, and ends everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
from harness.waiting import until

from shoal.control.home import ClusterConfig
from shoal.model.job import JobSpec
from shoal.model.service import Probe, Scale, ServiceSpec
from shoal.model.sites import SiteView
from shoal.model.views import ServiceView
from tests.live.cluster import Live, live_cluster, virtual_nodes
from tests.live.serving import need_gateway, replica_ports
from tests.live.test_neighbors import WEST, Cable, invited, known

NAME = "chat"
SERVER = """
import http.server, os, sys
class Replica(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = sys.argv[1].encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("", int(os.environ["PORT"])), Replica).serve_forever()
"""


class Both(NamedTuple):
    home: Live
    west: Live
    cable: Cable

    def serve(self, replica: JobSpec, *clusters: str, name: str = NAME) -> ServiceView:
        spec = ServiceSpec(
            name=name,
            replica=replica,
            scale=Scale(least=1, most=1),
            probe=Probe(),
            clusters=clusters,
        )
        return self.home.client.submit_service(spec)

    def says(self, text: str) -> JobSpec:
        return self.home.spec(sys.executable, "-c", SERVER, text, cpu_milli=100)

    def view(self) -> ServiceView:
        return self.home.client.service(NAME)

    def site(self) -> SiteView:
        return next((one for one in self.view().sites), SiteView(name=""))

    def settles(self, version: int) -> None:
        """Everywhere, in this version."""

        def there() -> bool:
            view = self.view()
            return view.version == version == self.site().version and view.state == "ready"

        until(there, more=lambda: (self.view().state, self.view().why, self.view().sites))


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    need_gateway()
    there = ClusterConfig(nodes=virtual_nodes(1), host="0.0.0.0", port=0)
    with live_cluster(nodes=1) as home, live_cluster(config=there) as west:
        for place, live in enumerate((home, west)):
            ports = replica_ports()
            ports["port_count"] //= 2
            ports["port_first"] += place * ports["port_count"]
            policy = live.client.policy()
            live.client.set_policy(msgspec.structs.replace(policy, **ports))
        port, token = invited(west)
        cable = Cable(port)
        known(home, WEST, f"https://127.0.0.1:{cable.port}", token)
        try:
            yield Both(home, west, cable)
        finally:
            cable.close()


def test_a_service_is_rolled_out_from_site_to_site_and_ends_everywhere(both: Both) -> None:
    both.serve(both.says("one"), "here", WEST)
    both.settles(1)
    there = both.west.client.service(NAME)
    assert there.spec.replica.tenant == "home" and there.state == "ready"
    until(lambda: both.site().address, "its door is not known", both.view)
    both.serve(both.says("two"), "here", WEST)
    both.settles(2)
    bad = both.home.spec("sh", "-c", "exit 3")
    assert both.serve(bad, WEST).version == 3
    both.settles(2)
    both.home.client.stop_service(NAME)
    until(lambda: not both.west.client.services(), "it runs on there")
    until(lambda: not both.home.client.services(), "it runs on here")
