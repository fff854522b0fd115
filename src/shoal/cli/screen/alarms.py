"""Problems to look at, most urgent first, each with a command that shows more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.model.views import JobRow, NodeView, ServiceView, StatusView

NODES_NAMED_MAX = 4
# After this time a restart of the controller is no longer news.
YOUNG_MS = 600_000
ASLEEP = ("asleep", "waking")  # a service without requests


class Alarm(NamedTuple):
    text: str
    see: str  # a command


def alarms(
    status: StatusView,
    nodes: Sequence[NodeView],
    services: Sequence[ServiceView],
    jobs: Sequence[JobRow],
) -> list[Alarm]:
    """`nodes` may leave out healthy nodes."""
    found = [Alarm(text, "controller.log in SHOAL_HOME") for text in status.alarms]
    for state, word in (
        ("lost", "is lost"),
        ("silent", "does not answer"),
        ("quarantined", "is in quarantine"),
    ):
        some = [node for node in nodes if node.state == state]
        if some:
            found.append(_of_nodes(some, word))
    for service in services:
        missing = service.wanted and not service.ready and service.state not in ASLEEP
        if service.state == "failing" or missing:
            why = f": {service.why}" if service.why else ""
            text = f"service {service.name} has {service.ready} of {service.wanted} replicas{why}"
            found.append(Alarm(text, f"shoal service {service.name}"))
    for job in jobs:
        if job.progress is not None and job.progress.slow:
            slow = len(job.progress.slow)
            who = "a slow member delays" if slow == 1 else f"{slow} slow members delay"
            found.append(Alarm(f"{job.id}: {who} the others", f"shoal why {job.id}"))
    if status.restarts and status.now_ms - status.up_since_ms < YOUNG_MS:
        times = "" if status.restarts == 1 else f", {status.restarts} times since `shoal up`"
        text = f"the controller died and was restarted{times}"
        found.append(Alarm(text, "controller.log in SHOAL_HOME"))
    return found


def _of_nodes(nodes: list[NodeView], word: str) -> Alarm:
    names = ", ".join(node.id for node in nodes[:NODES_NAMED_MAX])
    if len(nodes) > NODES_NAMED_MAX:
        names += f" and {len(nodes) - NODES_NAMED_MAX} more"
    if len(nodes) > 1:
        word = word.replace("is ", "are ").replace("does ", "do ")
        return Alarm(f"{names} {word}", "shoal nodes")
    why = f": {nodes[0].why}" if nodes[0].why else ""
    return Alarm(f"{names} {word}{why}", f"shoal events --node {nodes[0].id}")
