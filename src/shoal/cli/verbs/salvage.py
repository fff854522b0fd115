"""`shoal salvage`: recover what is readable from a damaged store."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.command import verb


@verb(on_head=True)
def salvage(json: bool, home: Path) -> None:
    """Recover what is readable from a damaged store.

    Use it when the controller reports that shoal.db is damaged and you have no
    copy to restore. What is readable replaces the damaged file, which is kept
    beside it under another name. The command lists what was kept and what was
    lost. Jobs on the nodes keep running meanwhile. Then start the cluster with
    `shoal up`.

    Examples:
      shoal salvage
      shoal salvage --home ~/try
    """
    from shoal.cli.screen import show
    from shoal.control.home import Home
    from shoal.control.lifecycle import is_up
    from shoal.control.store import salvage as saving
    from shoal.control.store.marks import Numbers
    from shoal.forms.failure import Failure
    from shoal.ports import StoreError

    place = Home(home)
    if is_up(place):
        raise Failure(f"a controller is running in {place.path}, so its store is not damaged")
    numbers = Numbers(place.marks, (place.logs, place.checkpoints, place.outputs))
    try:
        lines = saving.salvage(place.database, place.salvaged, numbers)
        place.salvage_report.write_text("\n".join(lines) + "\n")
    except (StoreError, OSError) as error:
        raise Failure(str(error)) from None
    if json:
        show.as_json({"lines": lines})
        return
    for line in lines:
        show.line(line)
    show.line(f"this list is also in {place.salvage_report}; next: shoal up --home {place.path}")
