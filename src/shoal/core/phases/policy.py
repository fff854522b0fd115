"""A new policy: in force for the rest of the step, unless it was made from another one."""

from __future__ import annotations

from shoal.core.state.round import Round
from shoal.model.events import PolicyChanged
from shoal.model.policy import SetPolicy, version_of
from shoal.model.report import Accepted, Answer, Refused


def set_policy(round_: Round, request: SetPolicy) -> Answer:
    """Whoever asks again for what is already in force is told so: an answer may have been lost."""
    now = round_.state.policy
    if request.policy == now:
        return Accepted("", "it is in force already; nothing changed")
    if request.expected and request.expected != version_of(now):
        message = "was changed by somebody else meanwhile; look at the one in force, then try again"
        return Refused("policy", message, late=True)
    event = PolicyChanged(at_ms=round_.now_ms, policy=request.policy, who=request.who)
    round_.emit(event)
    round_.obey(request.policy)
    return Accepted("")
