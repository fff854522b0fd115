"""A service in two real clusters with TLS between them: it is rolled out from site to site, goes
back everywhere if it fails at one, and ends everywhere."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import pytest
from harness.waiting import until

from shoal.client import ShoalError
from shoal.control.home import ClusterConfig
from shoal.core.state.events.services import ServiceSet, SitesTold
from shoal.model.job import JobSpec
from shoal.model.service import Probe, Scale, ServiceSpec
from shoal.model.sites import SiteView
from shoal.model.views import ServiceView
from tests.gateway.world import get
from tests.live.cluster import Live, live_cluster, virtual_nodes
from tests.live.serving import need_gateway, replica_ports
from tests.live.test_neighbors import WEST, Cable, invited, known

NAME = "chat"
SERVER = """
import http.server, os, sys
class Replica(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{sys.argv[1]} of {os.environ['SHOAL_OUTPUT']}".encode()
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
    home, west = both.home.client, both.west.client
    with pytest.raises(ShoalError, match="there is no neighbor 'south'"):
        both.serve(both.says("one"), "south")
    west.submit_service(ServiceSpec(name="taken", replica=both.says("theirs")))
    both.serve(both.says("ours"), WEST, name="taken")
    home.set_secret("token", b"a secret of home")
    one = msgspec.structs.replace(both.says("one"), secrets=("token=TOKEN",))
    both.serve(one, "here", WEST)
    both.settles(1)
    there = west.service(NAME)
    assert (there.spec.replica.tenant, there.spec.way.access) == ("home", ("open",))
    assert [secret.name.startswith("home-") for secret in west.secrets(tenant="home")] == [True]
    until(lambda: both.site().address, "its door is not known", both.view)
    door = both.site().address
    assert door.startswith("127.0.0.1:")
    events = west.events(after=-1000, limit=1000).events
    told = [one.event.doors for one in events if isinstance(one.event, SitesTold)]
    assert [far.site for far in told[-1]] == ["home"]
    assert "PRIVATE KEY" not in str(told)
    both.serve(both.says("two"), "here", WEST)
    both.settles(2)
    assert not west.secrets(tenant="home")
    (site,) = home.service("taken").sites
    assert site.state == "refused" and "taken is taken in this cluster" in site.why
    assert west.service("taken").spec.replica.tenant == "default"
    home.stop_service("taken")


def test_while_home_has_no_replica_its_gateway_calls_the_other_site(both: Both) -> None:
    home = both.home.client
    port = urlsplit(both.view().url).port or 0
    until(lambda: b"of" in get(port, f"/{NAME}/").body.encode())
    home.change_node("n1", "drain")
    west = str(both.west.home.path)

    seen: list[object] = []

    def there() -> bool:
        """What becomes of requests under way is counted elsewhere (tests/gateway/test_sites.py)."""
        try:
            answer = get(port, f"/{NAME}/")
        except (OSError, http.client.HTTPException) as error:
            seen.append(error)
            return False
        seen.append(answer)
        return answer.status == 200 and west in answer.body

    until(there, more=lambda: (seen[-5:], both.view()))
    home.change_node("n1", "uncordon")
    until(lambda: west not in get(port, f"/{NAME}/").body, more=both.view)
    both.settles(2)


def test_a_version_that_fails_at_one_site_goes_back_everywhere(both: Both) -> None:
    """It runs at home only: another cluster has another folder."""
    script = f'case "$SHOAL_OUTPUT" in {both.home.home.path}/*) exec "$@";; *) exit 3;; esac'
    good = both.says("three")
    words = ("sh", "-c", script, "sh", *good.command)
    both.serve(msgspec.structs.replace(good, command=words), "here", WEST)

    def went_back() -> bool:
        view = both.view()
        return view.version == 2 and "failed at west" in last_set(both)

    until(went_back, more=both.view)
    both.settles(2)
    assert both.west.client.service(NAME).spec.replica.command == both.says("two").command


def last_set(both: Both) -> str:
    events = both.home.client.events(after=-1000, limit=1000).events
    backs = [one.event.why for one in events if isinstance(one.event, ServiceSet)]
    return backs[-1]


def test_a_cut_and_dead_controllers_do_not_end_a_site_and_a_stop_reaches_it_later(
    both: Both,
) -> None:
    home, west = both.home.client, both.west.client
    with pytest.raises(ShoalError, match="service chat is there"):
        home.remove_neighbor(WEST)
    both.cable.cut()
    both.west.kill_controller()
    both.home.kill_controller()
    until(lambda: west.service(NAME).state == "ready", more=lambda: west.service(NAME))
    home.stop_service(NAME)
    until(lambda: "it ends at west" in both.view().why, more=lambda: both.view().why)
    both.cable.mend()
    until(lambda: [one.name for one in west.services()] == ["taken"], "it runs on there")
    until(lambda: not home.services(), "it runs on here")
