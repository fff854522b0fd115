"""What is learned of how long jobs run: small histograms of finished ones, by who and what."""

from __future__ import annotations

from shoal.model.job import Job

# Four buckets an octave: an expectation is at most a quarter too long by rounding.
BUCKETS_PER_OCTAVE = 4
BUCKETS_MAX = 40 * BUCKETS_PER_OCTAVE
GROUPS_MAX = 4096  # the group that learned longest ago makes room
COUNT_MAX = 64  # then all counts are halved, so that what is recent weighs more
ENOUGH = 3  # a group with fewer says nothing; a coarser one is asked


class Estimates:
    """Groups from fine to coarse: tenant, name and shape; tenant and shape; shape; all."""

    def __init__(self, groups: dict[str, dict[int, int]] | None = None) -> None:
        self.groups: dict[str, dict[int, int]] = groups or {}

    def learn(self, job: Job, ran_ms: int) -> None:
        bucket = _bucket(ran_ms)
        for key in _keys(job):
            counts = self.groups.pop(key, {})
            self.groups[key] = counts  # the latest to learn stands last
            counts[bucket] = counts.get(bucket, 0) + 1
            if sum(counts.values()) > COUNT_MAX:
                self.groups[key] = {b: n // 2 for b, n in counts.items() if n > 1}
        while len(self.groups) > GROUPS_MAX:
            del self.groups[next(iter(self.groups))]

    def expect(self, job: Job, percent: int) -> int | None:
        """So many of a hundred jobs like it were done after this long; None if none is known."""
        for key in _keys(job):
            counts = self.groups.get(key)
            if counts and sum(counts.values()) >= ENOUGH:
                return _quantile(counts, percent)
        return None


def _keys(job: Job) -> tuple[str, ...]:
    """A job without a name learns once for all that have none, and not twice."""
    spec = job.spec
    shape = f"{spec.members}x{spec.gpus}"
    fine = (f"{spec.tenant}/{spec.name}/{shape}",) if spec.name else ()
    return (*fine, f"{spec.tenant}//{shape}", f"//{shape}", "//")


def _bucket(ms: int) -> int:
    """The octave is the length of the number; its quarter the two bits below the highest."""
    ms = max(ms, 4)
    octave = ms.bit_length() - 1
    quarter = (ms >> (octave - 2)) & 3
    return min(octave * BUCKETS_PER_OCTAVE + quarter, BUCKETS_MAX)


def _quantile(counts: dict[int, int], percent: int) -> int:
    need = -(-sum(counts.values()) * percent // 100)
    for bucket in sorted(counts):
        need -= counts[bucket]
        if need <= 0:
            break
    octave, quarter = divmod(bucket, BUCKETS_PER_OCTAVE)
    return ((4 + quarter + 1) << octave) // 4  # the bucket's upper edge
