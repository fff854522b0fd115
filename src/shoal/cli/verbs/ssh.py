"""`shoal ssh-config` and `shoal ssh-proxy`: ssh, scp and editors reach jobs through the API."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.command import Argument, flag, verb

PREFIX = "shoal-"


@verb(flag("--write", help="Write the entry and the keys, and have ssh read them."))
def ssh_config(write: bool, json: bool, home: Path) -> None:
    """Print or write the entries with which ssh reaches running jobs.

    With --write, `ssh shoal-j7` opens a shell beside job j7, and `shoal-j7.1`
    is its member 1. scp, sftp, rsync, port forwarding, VS Code and PyCharm
    work with the same names. Nothing but the API has to be reachable. The
    entry is for the cluster that this command uses. The nodes need asyncssh:
    pip install 'shoal[ssh]'.

    Examples:
      shoal ssh-config --write
      ssh shoal-j7
      scp results.csv shoal-j7:
      ssh -L 8888:localhost:8888 shoal-j7
    """
    from shoal.cli.screen.show import as_json
    from shoal.machine.files import write_private
    from shoal.sessions import sshkeys

    text, done = sshkeys.entry(proxy(home)), []
    config, own = Path.home() / ".ssh" / "config", sshkeys.folder() / "config"
    if write:
        sshkeys.keys()
        write_private(own, text.encode())
        done.append(str(own))
        if sshkeys.include(config, own):
            done.append(str(config))
    if json:
        as_json({"entry": text, "written": done})
    elif not write:
        print(text, end="")
    else:
        print(f"written: {', '.join(done)}; try: ssh {PREFIX}JOB")


def proxy(home: Path) -> str:
    """The command that ssh runs, with the cluster that is in use now. Editors that call ssh may
    have another PATH, so it names the interpreter."""
    import shlex
    import sys

    from shoal.cli.cluster import context_in_use

    context = context_in_use()
    which = ["--context", context] if context else ["--home", str(home)]
    return shlex.join([sys.executable, "-m", "shoal.main", *which, "ssh-proxy"])


@verb(Argument("name", "NAME", "shoal-JOB or shoal-JOB.MEMBER."))
def ssh_proxy(name: str, json: bool, home: Path) -> int:  # noqa: ARG001
    """Connect ssh to a running job; the entries of ssh-config use it.

    It passes bytes between its own input and output and an SSH server for this
    connection, on the job's node.

    Examples:
      shoal ssh-proxy shoal-j7
    """
    from shoal.cli import cluster
    from shoal.cli.screen.show import note
    from shoal.cli.verbs.forward import target_of
    from shoal.sessions import sshkeys
    from shoal.sessions.terminal import relay

    found = sshkeys.keys()
    with cluster.connect(home) as client:
        target = target_of(client, name.removeprefix(PREFIX), None)()
        return relay(client, target, note, public_key=found.public, host_key=found.host)
