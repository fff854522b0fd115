"""Who may use InfiniBand and RoCE cards, and why a gang beside them talks over TCP."""

from __future__ import annotations

from shoal.core.state.state import State
from shoal.model.job import Job, JobSpec
from shoal.model.node import RDMA_OPEN, RDMA_ROOT
from shoal.model.policy import Rdma
from shoal.model.reason import quoted

NAMED_MAX = 4  # nodes, in a reason


def may_use(state: State, spec: JobSpec) -> bool:
    """Tenants that were added are kept apart; all others are the operator under another name. What
    a card sends is not encrypted."""
    rule, added = state.policy.rdma, state.identity.tenants
    allowed = rule is Rdma.EVERYONE or (rule is Rdma.OPERATOR and spec.tenant not in added)
    return allowed and not spec.encrypt_network


def fallback(state: State, job: Job) -> str:
    """Programs fall back to TCP without a word, and are many times slower. Empty: they need not,
    or their nodes have no cards."""
    nodes = dict.fromkeys(member.slice.node for member in job.members)
    cards = {name: state.nodes[name].spec.rdma or "" for name in nodes if name in state.nodes}
    if len(nodes) < 2 or not any(cards.values()):
        return ""
    kept_apart = job.spec.tenant in state.identity.tenants
    if job.spec.encrypt_network:
        why, there = "its network is encrypted (encrypt_network), and cards cannot", list(cards)
    elif not may_use(state, job.spec):
        why, there = f"the policy does not let it (rdma: {state.policy.rdma})", list(cards)
    elif there := [name for name, word in cards.items() if word not in ("", RDMA_OPEN, RDMA_ROOT)]:
        why = quoted(cards[there[0]])
    elif kept_apart and (there := [name for name, word in cards.items() if word == RDMA_ROOT]):
        why = "only root may open /dev/infiniband there"
    elif there := [name for name, word in cards.items() if not word]:
        return f"its members talk over TCP: {_have(there)} no InfiniBand, and others have"
    else:
        return ""
    there = [name for name in there if cards[name]]
    return f"its members talk over TCP although {_have(there)} InfiniBand: {why}"


def _have(nodes: list[str]) -> str:
    more = len(nodes) - NAMED_MAX
    names = ", ".join(nodes[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
    return f"{names} {'has' if len(nodes) == 1 else 'have'}"
