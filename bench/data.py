"""Measures how a data set reaches four hosts on shaped links: by Shoal, and by copies of each host.

python -m bench.data [--mb 100] [--rate 200mbit]      needs root, iproute2 and fsspec with aiohttp

Each host is a network namespace; its link and that of the origin have the same rate. Every way gets
a fresh file from the same web server, or rsync daemon, one after the other. The bytes are those
that leave the origin's card; of "package", which is a working directory sent with a job, those that
leave the head's. A way whose program is missing is named and left out. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness.hosts import SERVE, Net, missing
from harness.waiting import until

from bench.figures import machine, table

SHOAL = (sys.executable, "-m", "shoal.main")
HOSTS = ("h1", "h2", "h3", "h4")
PORT, RSYNC_PORT = 8000, 8730
FSSPEC = (
    "import sys, fsspec; fs, path = fsspec.core.url_to_fs(sys.argv[1]); fs.get(path, sys.argv[2])"
)


class Bench:
    def __init__(self, net: Net, mb: int, rate: str) -> None:
        self.head = net.add("head")
        self.shoal("up", "--nodes", "1", "--gpus", "1", "--host", self.head.address)
        token = (self.head.home / ".shoal" / "join-token").read_text().strip()
        self.hosts = [net.add(name) for name in HOSTS]
        words = ("join", f"https://{self.head.address}:7700", "--gpus", "1", "--name")
        env = {"SHOAL_JOIN_TOKEN": token}
        joins = [host.start(*SHOAL, *words, host.name, env=env) for host in self.hosts]
        assert [join.wait(60) for join in joins] == [0] * len(joins), "a host cannot join"
        self.shoal("drain", "n1")
        self.origin = net.add("origin")
        self.folder = net.scratch / "sets"
        self.folder.mkdir()
        self.bytes, self.check = mb << 20, ""
        self.origin.start(sys.executable, "-c", SERVE, str(self.folder), str(PORT))
        for host in (*self.hosts, self.origin, self.head):
            host.slow(rate)

    def fresh(self, name: str) -> str:
        """Another file of the same size; returns its hash."""
        data = os.urandom(self.bytes)
        (self.folder / name).write_bytes(data)
        return hashlib.sha256(data).hexdigest()

    def url(self, name: str) -> str:
        return f"http://{self.origin.address}:{PORT}/{name}"

    def timed(self, name: str, way: Callable[[str, str], None]) -> tuple[float, float]:
        """Seconds until all four have it, and how often the set left the origin."""
        if way != self.again:
            self.check = self.fresh(name)
        check = self.check
        origin = self.head if way == self.package else self.origin
        before, begun = origin.sent_bytes(), time.monotonic()
        way(name, check)
        took_s = time.monotonic() - begun
        return took_s, (origin.sent_bytes() - before) / self.bytes

    def shoal(self, *words: str) -> None:
        done = self.head.run(*SHOAL, *words, timeout_s=600)
        assert done.returncode == 0, f"shoal {' '.join(words)}: {done.stdout} {done.stderr}"

    def volume(self, name: str, check: str) -> None:
        verify = f'test "$(sha256sum <$SHOAL_VOLUME_DATA/{name} | cut -c1-64)" = {check}'
        flags = ("--members", "4", "--per-node", "1", "--gpus", "1", "--wait")
        self.shoal("run", *flags, "--volume", f"{self.url(name)}:data", "--", "sh", "-c", verify)

    def again(self, _: str, check: str) -> None:
        """A second job, on what the nodes have."""
        self.volume("shoal.bin", check)

    def package(self, name: str, check: str) -> None:
        """The same bytes as a working directory, whose origin is the head."""
        verify = f'test "$(sha256sum <{name} | cut -c1-64)" = {check}'
        flags = ("--members", "4", "--per-node", "1", "--gpus", "1", "--wait", "--pack")
        words = shlex.join((*SHOAL, "run", *flags, "--", "sh", "-c", verify))
        place = self.head.home / "package"
        place.mkdir()
        shutil.move(self.folder / name, place / name)
        done = self.head.run("sh", "-c", f"cd {place} && {words}", timeout_s=600)
        assert done.returncode == 0, f"{words}: {done.stdout} {done.stderr}"

    def each(self, name: str, check: str, *command: str) -> None:
        """The same command on every host, at the same time."""
        started = []
        for host in self.hosts:
            target = host.work / name
            words = [word.replace("TARGET", str(target)) for word in command]
            started.append((target, host.start(*words)))
        for target, process in started:
            assert process.wait(600) == 0, f"{command[0]} failed"
            assert hashlib.sha256(target.read_bytes()).hexdigest() == check
            target.unlink()

    def fsspec(self, name: str, check: str) -> None:
        self.each(name, check, sys.executable, "-c", FSSPEC, self.url(name), "TARGET")

    def rsync(self, name: str, check: str) -> None:
        config = self.folder.parent / "rsyncd.conf"
        config.write_text(f"use chroot = no\nuid = 0\n[sets]\npath = {self.folder}\n")
        words = ("--daemon", "--no-detach", f"--port={RSYNC_PORT}", f"--config={config}")
        self.origin.start("rsync", *words)
        source = f"rsync://{self.origin.address}:{RSYNC_PORT}/sets/"
        until(lambda: self.hosts[0].run("rsync", source).returncode == 0, "rsync does not answer")
        self.each(name, check, "rsync", "-W", source + name, "TARGET")

    def rclone(self, name: str, check: str) -> None:
        self.each(
            name, check, "rclone", "copyto", f":http:{name}", "TARGET", "--http-url", self.url("")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--rate", default="200mbit")
    asked = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    scratch = Path(tempfile.mkdtemp(prefix="sd-"))
    net = Net(scratch)
    try:
        bench = Bench(net, asked.mb, asked.rate)
        print(f"{machine()}; {asked.mb} MiB, links of {asked.rate}")
        ways = {
            "shoal": bench.volume,
            "again": bench.again,
            "package": bench.package,
            "fsspec": bench.fsspec,
        }
        for tool, way in (("rsync", bench.rsync), ("rclone", bench.rclone)):
            if shutil.which(tool):
                ways[tool] = way
            else:
                print(f"left out: {tool} is not installed")
        figures = {name: bench.timed(f"{name}.bin", way) for name, way in ways.items()}
        rows = [(name, f"{took:.1f}", f"{sets:.2f}") for name, (took, sets) in figures.items()]
        print(table(("way", "s to the last host", "sets from the origin"), rows))
        found: dict[str, float] = {}
        for name, (took, sets) in figures.items():
            found |= {f"{name}_s": round(took, 1), f"{name}_sets": round(sets, 2)}
        found["shoal_to_fsspec"] = round(figures["shoal"][0] / figures["fsspec"][0], 2)
        print(json.dumps(found))
    finally:
        net.close()
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
