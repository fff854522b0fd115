"""A real sshd on a host of a test, and a key that opens it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from harness.hosts import Host
from harness.waiting import WAIT_S, until

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin") or ""


def make_key(host: Host) -> Path:
    """The key of the user who sits at this host; returns its public half."""
    key = host.home / ".ssh" / "id_ed25519"
    key.parent.mkdir(mode=0o700)
    _keygen(key)
    return key.with_suffix(".pub")


def serve_ssh(host: Host, opens: Path, client: Host, *settings: str) -> None:
    """Whoever has the other half of the key `opens` may come in; `client` knows the host's key."""
    place = host.home / "sshd"
    place.mkdir()
    _keygen(place / "host_key")
    Path("/run/sshd").mkdir(exist_ok=True)
    config = place / "config"
    config.write_text(
        "\n".join(
            [
                f"ListenAddress {host.address}:22",
                f"HostKey {place}/host_key",
                f"AuthorizedKeysFile {opens}",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                "PermitRootLogin prohibit-password",
                "StrictModes no",  # the key lies below /tmp
                "UsePAM no",
                "PidFile none",
                *settings,
                "",
            ]
        )
    )
    host.start(SSHD, "-D", "-e", "-f", str(config))
    words = (place / "host_key.pub").read_text().split()
    with (client.home / ".ssh" / "known_hosts").open("a") as known:
        known.write(f"{host.address} {words[0]} {words[1]}\n")
    until(lambda: _answers(client, host), "sshd does not answer")


def _answers(client: Host, host: Host) -> bool:
    return client.run("ssh", "-o", "BatchMode=yes", host.address, "true").returncode == 0


def _keygen(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=WAIT_S
    )
