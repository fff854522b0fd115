"""`shoal salvage`: save what can be read of a damaged store."""

from __future__ import annotations

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption


def salvage(json: JsonOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """Save what can be read of a damaged store.

    For when the controller says that shoal.db is damaged, and there is no copy
    to put back. What can be read takes the damaged file's place, which stays
    beside it under another name; you are told what was kept and what is lost.
    Jobs that run on the nodes go on meanwhile. Afterwards: shoal up.

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
        raise Failure(f"a controller runs in {place.path}: its store is in use, and not damaged")
    numbers = Numbers(place.marks, (place.logs, place.checkpoints))
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
    show.line(f"this is also in {place.salvage_report}; go on with: shoal up --home {place.path}")
