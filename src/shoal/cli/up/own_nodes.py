"""The nodes of a head's own machine, in a cluster with several heads: they dial in like those of
other machines, so that they belong to whichever head leads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.control.home import ClusterConfig, Home

PATIENCE_S = 60.0  # until a head leads


def starter(home: Home, config: ClusterConfig) -> Callable[[str], None]:
    """Starts them when the controller is there: it gets the controller's URL."""

    def start(url: str) -> None:
        if config.database:
            _start(home, config, url)

    return start


def _start(home: Home, config: ClusterConfig, url: str) -> None:
    import msgspec

    from shoal.cli.up import membership
    from shoal.client import Client
    from shoal.control.reach import machine_address
    from shoal.engines.agentlink import write_spec
    from shoal.engines.linked.joining import prepare
    from shoal.machine.folder import LINK_FILE
    from shoal.model.node import JOINED

    address, token = machine_address(config.host), ""
    for one in config.nodes:
        spec = msgspec.structs.replace(one, origin=JOINED, address=address)
        folder = home.node(spec.id)
        if (folder / LINK_FILE).exists() and not membership.refused(folder):
            write_spec(folder, spec)
            _show_heads(home, folder / LINK_FILE)
        else:
            if not token:
                with Client.at_home(home.path, patience_s=PATIENCE_S) as client:
                    token = client.join_token()
            prepare(home.path, url, token, spec, PATIENCE_S)
        membership.start(folder)


def _show_heads(home: Home, file: Path) -> None:
    """The node may know only heads that do not lead any more."""
    import msgspec

    from shoal.client import Client
    from shoal.link.wire import LinkFile
    from shoal.machine.files import write_private

    with Client.at_home(home.path, patience_s=PATIENCE_S) as client:
        urls = tuple(head.url for head in client.heads())
    link = msgspec.json.decode(file.read_bytes(), type=LinkFile)
    if urls and urls != link.heads:
        write_private(file, msgspec.json.encode(msgspec.structs.replace(link, heads=urls)))
