"""Convert a published trace to the plain CSV that `shoal sim` reads.

    python -m bench.readers FORMAT FILE > plain.csv

FORMAT is muri, elasticflow, shockwave, pollux or openb. Shares of a GPU become whole GPUs.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.readers import PUBLISHED, read_trace
from shoal.sim.replay.traces import Gangs, TraceError

GPUS_MAX = 1 << 30  # no job is split into members: `shoal sim` does that for its own nodes
COLUMNS = ("submit_s", "duration_s", "gpus", "tenant", "cpus", "memory_gb")


def main(words: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if words is None else words)
    if len(given) != 2 or given[0] not in PUBLISHED:
        print(__doc__, file=sys.stderr)
        return 2
    gangs = Gangs(GPUS_MAX, cpus_count=True, memory_counts=True)
    try:
        trace = read_trace(Path(given[1]), gangs, form=given[0])
    except (TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    out = csv.writer(sys.stdout)
    out.writerow(COLUMNS)
    for one in trace.arrivals:
        spec = one.spec
        times = one.submit_ms / 1000, one.work_ms / 1000
        sizes = spec.gpus * spec.members, one.tenant, spec.cpu_milli / 1000, spec.memory_mb / 1024
        out.writerow((*times, *sizes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
