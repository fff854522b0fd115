"""A replica's port is its own, or it does not start."""

from __future__ import annotations

import socket

from shoal.model.job import MemberRef
from tests.agent.rig import rig


def test_a_replica_whose_port_is_taken_does_not_start() -> None:
    """Else whoever has the port would answer the probe in its place."""
    with rig() as node, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        one, two = MemberRef("j1", 1, 0), MemberRef("j2", 1, 0)
        node.launch(one, "echo", "never", env={"SHOAL_SERVICE": "chat", "PORT": port})
        ended = node.exit(one)
        assert ended.code == 127
        assert f"port {port} is not free on this node" in ended.why
        node.launch(two, "echo", "fine", env={"PORT": port})
        assert node.exit(two).code == 0, "a job of any other kind may use the name as it likes"
