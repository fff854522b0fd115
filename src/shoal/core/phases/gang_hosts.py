"""The nodes of a gang as launchers want them: host1:8,host2:8."""

from __future__ import annotations

from collections import Counter

from shoal.core.state.state import State
from shoal.model.job import ARGUMENT_BYTES_MAX, Job

HOSTS = "SHOAL_HOSTS"
# Of larger gangs only member 0 gets the list: for all of them it would grow with the square.
EVERYWHERE_MAX = 256


def hosts_text(state: State, job: Job) -> str:
    """In the order of the members. Nodes that share an address go by their ids. A slot is a GPU,
    or a CPU if there are none. Empty if no process could be given so long a text."""
    slots = job.spec.gpus or max(1, job.spec.cpu_milli // 1000)
    nodes = Counter(member.slice.node for member in job.members)
    address = {node: state.nodes[node].spec.address for node in nodes}
    shared = Counter(address.values())
    names = {node: node if shared[place] > 1 else place for node, place in address.items()}
    text = ",".join(f"{names[node]}:{slots * count}" for node, count in nodes.items())
    return text if len(HOSTS) + 1 + len(text) <= ARGUMENT_BYTES_MAX else ""
