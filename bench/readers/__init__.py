"""Published traces that the benchmarks replay, beside the formats that `shoal sim` reads itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.readers import elasticflow, muri, openb, pollux, shockwave
from shoal.sim.replay import readers
from shoal.sim.replay.traces import Gangs, Trace

PUBLISHED = {
    "muri": muri,
    "elasticflow": elasticflow,
    "shockwave": shockwave,
    "pollux": pollux,
    "openb": openb,
}


def read_trace(
    path: Path, gangs: Gangs, *, form: str = "", where: Mapping[str, str] | None = None
) -> Trace:
    known = {**PUBLISHED, **readers.READERS}
    return readers.read_trace(path, gangs, form=form, where=where, readers=known)
