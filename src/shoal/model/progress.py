"""What a member reports while it runs: steps, where the time went, losses, checkpoints.

A member sends `Beat`s to its node's agent, in msgpack, as datagrams to the abstract Unix socket
named in SHOAL_BEATS. All numbers count from the start of the process, so a lost beat does no harm:
the next one has everything. A member that never sends a beat is not watched for steps.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.job import MemberRef

METRICS_MAX = 16
BEAT_BYTES_MAX = 4096
BEATS_ENV = "SHOAL_BEATS"  # in a member's environment: the socket's name, without the leading NUL

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Beat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sent after a step, several times a second at most, and around checkpoints."""

    ref: str  # SHOAL_REF, as the agent gave it
    step: Count = 0  # the number of the next step: the steps done so far, over all attempts
    steps: Count = 0  # steps done by this process
    compute_us: Count = 0  # spent on its own work
    wait_us: Count = 0  # waiting for its peers, in collectives
    transfer_us: Count = (
        0  # of these, as long as the quickest of every few steps took: no peer late
    )
    data_us: Count = 0  # waiting for the next batch
    save_us: Count = 0  # blocked by saves and restores
    stall_us: Count = 0  # some process of the member waited for storage, as the kernel counts it
    samples: Count = 0
    steps_total: Count = 0  # steps of the whole run; 0: not known
    saved_step: Count = 0  # the step that the newest complete checkpoint continues with
    saves: Count = 0
    unsaved: Count = 0  # saves in a row that have failed by now
    busy: bool = False  # between steps on purpose: saving, restoring, evaluating, finishing
    loss: float | None = None
    metrics: Annotated[dict[str, float], msgspec.Meta(max_length=METRICS_MAX)] = {}


class Progress(msgspec.Struct, frozen=True):
    """The newest beat of a member, and how long before the report its last step was done."""

    ref: MemberRef
    beat: Beat
    quiet_ms: int


class Spent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the time of a member's steps went: these fields of a beat."""

    steps: int = 0
    compute_us: int = 0
    wait_us: int = 0
    transfer_us: int = 0
    data_us: int = 0
    save_us: int = 0
    stall_us: int = 0

    def since(self, before: Spent) -> Spent:
        """`transfer_us` is an estimate, and may become less."""
        return Spent(
            self.steps - before.steps,
            max(0, self.compute_us - before.compute_us),
            max(0, self.wait_us - before.wait_us),
            max(0, self.transfer_us - before.transfer_us),
            max(0, self.data_us - before.data_us),
            max(0, self.save_us - before.save_us),
            max(0, self.stall_us - before.stall_us),
        )


def spent_of(beat: Beat) -> Spent:
    return Spent(
        beat.steps,
        beat.compute_us,
        beat.wait_us,
        beat.transfer_us,
        beat.data_us,
        beat.save_us,
        beat.stall_us,
    )
