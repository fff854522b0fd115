"""A real NFS between hosts: Debian's nfs-ganesha serves, and the kernel's client mounts it. The
kernels of our test machines have no client, so this is skipped there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.hosts import Host, Net, switched
from harness.shared_files import Daemon
from harness.waiting import until

from shoal.model.node import NodeIntent
from tests.netns.cluster import Cluster

pytestmark = pytest.mark.soak

SERVES = """
NFS_CORE_PARAM {{ Protocols = 4; mount_path_pseudo = true; NFS_Port = 2049; Enable_NLM = false; }}
NFSV4 {{ Graceless = true; RecoveryRoot = "{state}"; }}
EXPORT {{
    Export_Id = 1; Path = "{folder}"; Pseudo = "/data"; Access_Type = RW; Squash = No_Root_Squash;
    SecType = sys;
    FSAL {{ Name = VFS; }}
}}
"""
OPTIONS = "vers=4.2,proto=tcp,hard,timeo=50"


def no_client() -> str:
    known = Path("/proc/filesystems").read_text().split()
    module = next(Path("/lib/modules").glob("*/kernel/fs/nfs/nfsv4.ko*"), None)
    if "nfs4" in known or (module is not None and shutil.which("modprobe")):
        return ""
    return "this kernel has no NFS client"


class Nfs:
    def __init__(self, net: Net) -> None:
        self.net, self.path = net, net.scratch / "nfs"
        self.host = host = net.add("server")
        folder, state = host.home / "export", host.home / "state"
        for one in (folder, state, self.path):
            one.mkdir()
        config = host.home / "ganesha.conf"
        config.write_text(SERVES.format(folder=folder, state=state))
        host.run("mount", "-t", "tmpfs", "tmpfs", "/run")  # for its socket
        host.start("rpcbind", "-f")
        words = ("-f", str(config), "-L", str(host.home / "ganesha.log"))
        pid = ("-p", str(host.home / "ganesha.pid"))
        self.server = Daemon(host, "ganesha.nfsd", "-F", *words, *pid)
        port = ("bash", "-c", f"exec 3<>/dev/tcp/{host.address}/2049")
        until(lambda: host.run(*port).returncode == 0, "ganesha does not listen")

    def mount(self, host: Host) -> None:
        source = f"{self.host.address}:/data"
        done = host.run("mount", "-t", "nfs4", "-o", OPTIONS, source, str(self.path))
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def nfs(hosts_possible: None) -> Iterator[Nfs]:
    for program, package in (("ganesha.nfsd", "nfs-ganesha-vfs"), ("mount.nfs4", "nfs-common")):
        if shutil.which(program) is None and not no_client():
            pytest.skip(f"{program} is not installed: apt-get install {package}")
    if reason := no_client():
        pytest.skip(reason)
    with switched() as net:
        yield Nfs(net)


@pytest.fixture(scope="module")
def cluster(nfs: Nfs) -> Iterator[Cluster]:
    made = Cluster(nfs.net, ("h1", "h2"), prepare=nfs.mount)
    yield made
    made.close()


def test_jobs_wait_for_an_nfs_server_that_is_held_with_its_name_and_go_on(
    cluster: Cluster, nfs: Nfs
) -> None:
    script = "cd $SHOAL_VOLUME_DATA; until test -e end; do date > now; sleep 0.1; done"
    data = {"volumes": [f"{nfs.path}:data"]}
    inside = cluster.submit(script, gpus=1, where=["node=h1"], **data)
    cluster.wait(inside, "running")
    says = f"{nfs.path} "
    nfs.server.stop()
    try:
        waits = cluster.submit("echo late", **data)
        for job in (waits, inside):
            cluster.until(lambda: says in cluster.job(job).why, "why does not name it")  # noqa: B023
        assert cluster.wait(cluster.submit("echo other", gpus=1)).state == "succeeded"
        assert cluster.ready() == {"n1", "h1", "h2"}
    finally:
        nfs.server.go_on()
    assert cluster.wait(waits).state == "succeeded", cluster.story()
    assert cluster.head.run("touch", f"{nfs.path}/end").returncode == 0
    assert cluster.wait(inside).state == "succeeded", cluster.story()


def test_a_server_that_is_killed_and_started_again_loses_nothing(
    cluster: Cluster, nfs: Nfs
) -> None:
    """A hard mount waits for it."""
    cluster.ask(lambda client: client.set_intent("n1", NodeIntent.OPEN))
    write = "for n in $(seq 200); do echo $n > $SHOAL_VOLUME_DATA/$SHOAL_MEMBER.$n || exit 4; done"
    job = cluster.submit(write, members=2, gpus=1, volumes=[f"{nfs.path}:data"])
    cluster.wait(job, "running")
    nfs.server.kill()
    nfs.server.start()
    assert cluster.wait(job).state == "succeeded", cluster.story()
    count = cluster.head.run("sh", "-c", f"cat {nfs.path}/[01].* | wc -l")
    assert count.stdout.strip() == "400"
