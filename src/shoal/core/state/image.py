"""A snapshot as bytes: equal specs once, and nothing that has its default.

Two lines of JSON: live jobs, with their specs by number, then everything else. Versions before
0.7.0 wrote a snapshot as one line, which is read as well.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.core.state.facts import Node, Snapshot
from shoal.model.job import Job, JobSpec
from shoal.model.lean import lean

_BEGINS = b'{"specs":'
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Snapshot).decode


class _Jobs(msgspec.Struct):
    specs: list[JobSpec]
    jobs: list[dict[str, Any]]  # `spec` is its place in `specs`


_decode_jobs = msgspec.json.Decoder(_Jobs).decode


def encoded(snapshot: Snapshot) -> bytes:
    places: dict[bytes, int] = {}
    jobs: list[Any] = []
    last, place = None, 0
    for job in snapshot.jobs:
        if job.spec is not last:  # the state shares equal ones, and they often come in a row
            last = job.spec
            place = places.setdefault(_encode(lean(last)), len(places))
        jobs.append(lean(job, spec=place))
    specs: list[Any] = list(map(msgspec.Raw, places))
    others = lean(snapshot, jobs=[], nodes=[_lean_node(node) for node in snapshot.nodes])
    return _encode(_Jobs(specs, jobs)) + b"\n" + _encode(others)


def _lean_node(node: Node) -> Any:
    return lean(node, spec=lean(node.spec), record=lean(node.record))


def decoded(body: bytes) -> Snapshot:
    """Raises `msgspec.DecodeError`, or another `ValueError`, if it is not a snapshot."""
    if not body.startswith(_BEGINS):
        return _decode(body)
    first, _, rest = body.partition(b"\n")
    shared, snapshot = _decode_jobs(first), _decode(rest)
    for row in shared.jobs:
        place = row["spec"]
        row["spec"] = shared.specs[place]
    snapshot.jobs.extend(msgspec.convert(shared.jobs, list[Job]))
    return snapshot
