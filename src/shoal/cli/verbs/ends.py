"""`shoal ends`: on a node's own machine, say until when the node lives."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.command import Option, flag, verb
from shoal.cli.moments import AT, IN


@verb(
    IN,
    AT,
    Option("--why", metavar="TEXT", default="", help="What ends it, e.g. 'spot notice'."),
    flag("--never", help="Take it back: no end is known."),
    Option("--node", metavar="N", help="One node of several here. [all of them]"),
    on_head=True,
)
def ends(
    in_: str | None,
    at: str | None,
    why: str,
    never: bool,
    node: str | None,
    json: bool,
    home: Path,
) -> None:
    """Say until when this machine's node lives.

    For scripts on a node: a cloud's spot notice, a batch script with a time
    limit, a hook of a pod that will be evicted. The scheduler then starts here
    only what is expected to be done in time or saves its work, and moves jobs
    away before the end. On other machines use `shoal drain NODE --in T`.

    Examples:
      shoal ends --in 2m --why "spot notice"
      shoal ends --at 18:30 --why "rented until then"
      shoal ends --never
    """
    import time

    from shoal.cli.moments import ms_from_now
    from shoal.cli.screen import show
    from shoal.control.home import Home
    from shoal.forms.failure import USAGE, Failure
    from shoal.machine.ends import forget_end, write_end
    from shoal.model.durations import duration_text

    left_ms = ms_from_now(at, in_)
    if never is (left_ms is not None):
        raise Failure("give one of --in, --at and --never", USAGE)
    folders = _folders(Home(home).nodes, node)
    for folder in folders:
        if left_ms is None:
            forget_end(folder)
        else:
            write_end(folder, time.time() + left_ms / 1000, why)
    names = [folder.name for folder in folders]
    if json:
        show.as_json([{"node": name, "ends_in_ms": left_ms} for name in names])
    elif left_ms is None:
        show.line(f"no end is known of {', '.join(names)}")
    else:
        show.line(f"{', '.join(names)} ends in {duration_text(left_ms)}")


def _folders(nodes: Path, wanted: str | None) -> list[Path]:
    from shoal.forms.failure import Failure
    from shoal.machine.folder import SPEC

    found = sorted(path for path in nodes.glob("*") if (path / SPEC).exists())
    names = ", ".join(path.name for path in found)
    if not found:
        raise Failure(f"no node of a cluster is on this machine ({nodes}); add one: shoal join")
    if wanted is None:
        return found
    chosen = [path for path in found if path.name == wanted]
    if not chosen:
        raise Failure(f"--node: there is no {wanted[:63]!r} on this machine; there is {names}")
    return chosen
