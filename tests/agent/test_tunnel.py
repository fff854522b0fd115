"""What a member of a gang with an encrypted network finds in its environment."""

from __future__ import annotations

from pathlib import Path

from shoal.agent.tunnel.end import name_of
from shoal.agent.tunnel.tunnels import inside
from shoal.model.tunnel import Far, Tunnel

ENDS = tuple(Far(f"n{i}", "key", f"10.0.0.{i}", 4000, f"fd00::{i}") for i in (1, 2))
TUNNEL = Tunnel("j1", 1, "fd00::/64", ENDS)
PLAIN = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "PET_MASTER_ADDR": "10.0.0.1",
    "SHOAL_HOSTS": "10.0.0.1:8,10.0.0.2:4",
}


def test_addresses_lead_into_the_tunnel_and_ports_and_slots_stay() -> None:
    found = inside(PLAIN, TUNNEL, "sw1", "n2")
    assert found["MASTER_ADDR"] == "fd00::1"
    assert found["PET_MASTER_ADDR"] == "[fd00::1]"
    assert found["MASTER_PORT"] == "29500"
    assert found["SHOAL_HOSTS"] == "fd00::1:8,fd00::2:4"
    assert found["SHOAL_TUNNEL"] == "fd00::2"
    assert found["NCCL_SOCKET_IFNAME"] == "=sw1"
    assert found["GLOO_SOCKET_IFNAME"] == "sw1"
    assert found["NCCL_IB_DISABLE"] == "1"
    assert not any("10.0.0." in value for value in found.values())


def test_interfaces_that_the_job_names_stay() -> None:
    own = {"NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "lo"}
    found = inside({**PLAIN, **own}, TUNNEL, "sw1", "n1")
    assert {name: found[name] for name in own} == own
    assert found["MASTER_ADDR"] == "fd00::1", "where a gang meets is not the job's to say"


def test_an_interface_has_a_name_that_the_kernel_takes_and_that_no_other_has() -> None:
    names = {
        name_of(Path(node), job, attempt)
        for node in ("/a/nodes/n1", "/a/nodes/n2")
        for job in ("j1", "j999999.99999")
        for attempt in (1, 2)
    }
    assert len(names) == 8
    assert all(len(name) < 16 for name in names)
