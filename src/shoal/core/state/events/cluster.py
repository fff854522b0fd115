"""What happens to the cluster as a whole: its clock, its policy, its controllers."""

from __future__ import annotations

from typing import Self

import msgspec

from shoal.core.state.apply_queue import adopt_policy, judge_holds
from shoal.core.state.apply_room import file_again
from shoal.core.state.events.base import ClusterEvent, Reader
from shoal.core.state.events.supply import forget_setbacks
from shoal.core.state.state import State
from shoal.model.durations import moment_text
from shoal.model.node import NodeHealth
from shoal.model.phrases import printable
from shoal.model.policy import Policy


class ClockJumped(ClusterEvent, frozen=True, kw_only=True):
    """The machine's clock was set and is `drift_ms` ahead of the cluster's time, which runs on."""

    drift_ms: int
    why: str

    def apply(self, state: State) -> None:
        state.drift_ms = self.drift_ms

    @property
    def subject(self) -> str:
        return "the clock"

    def sentence(self) -> str:
        return printable(self.why)


class PolicyChanged(ClusterEvent, frozen=True, kw_only=True):
    policy: Policy
    who: str = ""  # empty: the controller started with it

    def apply(self, state: State) -> None:
        before = state.policy
        forget_setbacks(state, self.policy)
        adopt_policy(state, self.policy)
        if before.place is not self.policy.place:
            file_again(state)
        if before.tenants != self.policy.tenants:
            judge_holds(state)  # another tree: other tenants may be held

    @property
    def subject(self) -> str:
        return "the policy"

    def phrase(self) -> str:
        policy = self.policy
        return (
            f"is now '{policy.name}': order {policy.order}, "
            f"placement {policy.placement}, preempt {policy.preempt}"
        )

    def concealed(self, reader: Reader) -> Self:
        return msgspec.structs.replace(self, policy=reader.policy(self.policy), who="")


class ControllerStarted(ClusterEvent, frozen=True, kw_only=True):
    """`epoch` fences the commands of controllers before this one. `first_port` was where a new
    cluster began to take ports, while they were taken in turn. Job numbers below `first_job` are
    already in use, even if this log does not show it. If the log has lost events, so are attempts
    of these jobs below `first_attempt`, and orders below `first_order`."""

    epoch: int
    first_port: int = 0
    first_job: int = 0
    first_attempt: int = 0
    first_order: int = 0

    def apply(self, state: State) -> None:
        state.epoch = self.epoch
        state.next_port += self.first_port
        state.next_job = max(state.next_job, self.first_job)
        state.next_order = max(state.next_order, self.first_order)
        if self.first_attempt:
            _skip_attempts(state, self.first_attempt)
        # No report could arrive while no controller ran, so silence counts from now.
        state.heard.contacts = {
            node.id: self.at_ms for node in state.order if node.health is not NodeHealth.LOST
        }
        state.heard.said, state.heard.leasing = {}, {}

    @property
    def subject(self) -> str:
        return "the controller"

    def phrase(self) -> str:
        return f"restarted (start {self.epoch})" if self.epoch > 1 else "started"


class ClusterRestored(ClusterEvent, frozen=True, kw_only=True):
    """The log ends where a backup was made; what happened later is lost. The nodes may have seen
    epochs below `epoch`, jobs below `first_job`, attempts of these jobs below `first_attempt`, and
    orders below `first_order`: none of these numbers is given out again."""

    saved_ms: int
    epoch: int
    first_job: int
    first_attempt: int
    first_order: int

    def apply(self, state: State) -> None:
        state.epoch = max(state.epoch, self.epoch)
        state.next_job = max(state.next_job, self.first_job)
        state.next_order = max(state.next_order, self.first_order)
        _skip_attempts(state, self.first_attempt)

    @property
    def subject(self) -> str:
        return "the cluster"

    def phrase(self) -> str:
        return (
            f"was restored from its backup of {moment_text(self.saved_ms)}: "
            f"what happened later is lost, and new jobs begin at j{self.first_job}"
        )


def _skip_attempts(state: State, first: int) -> None:
    """Events were lost: nodes may know attempts of these jobs that the log does not."""
    state.restored_job = state.next_job
    state.restored_attempt = max(state.restored_attempt, first)
