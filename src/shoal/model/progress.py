"""What a member says of itself while it runs: steps, where the time went, losses, checkpoints.

A member sends `Beat`s to its node's agent as datagrams to the abstract Unix socket that is named
in SHOAL_BEATS, in msgpack. All numbers count from the start of the process, so a beat that gets
lost costs nothing: the next one says it all. Who never beats is not watched for steps.
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
    step: Count = 0  # the number of the next step: so many are done, over all attempts
    steps: Count = 0  # steps done by this process
    compute_us: Count = 0  # in its own work
    wait_us: Count = 0  # in collectives, for its peers
    data_us: Count = 0  # for the next batch
    save_us: Count = 0  # blocked by saves and restores
    samples: Count = 0
    steps_total: Count = 0  # how many steps the run will have; 0: not known
    saved_step: Count = 0  # the step that the newest whole checkpoint continues with
    saves: Count = 0
    busy: bool = False  # between steps on purpose: saving, restoring, evaluating, winding up
    loss: float | None = None
    metrics: Annotated[dict[str, float], msgspec.Meta(max_length=METRICS_MAX)] = {}


class Progress(msgspec.Struct, frozen=True):
    """The newest beat of a member, and how long ago its last step was done when this was said."""

    ref: MemberRef
    beat: Beat
    quiet_ms: int
