"""`shoal salvage`: recover what is readable from a damaged store."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.command import Option, verb


@verb(
    Option("--from", "from_", metavar="BACKUP", help="Take what is lost from this backup."),
    on_head=True,
)
def salvage(from_: str | None, json: bool, home: Path) -> None:
    """Recover what is readable from a damaged store.

    Use it when the controller reports that shoal.db is damaged. What is readable
    replaces the damaged file, which is kept beside it under another name. The
    command lists what was kept and what was lost. With --from, a backup fills what
    the damaged file lacks, so that only what is missing in both is lost. Jobs on
    the nodes keep running meanwhile. Then start the cluster with `shoal up`.

    Examples:
      shoal salvage
      shoal salvage --from /mnt/backups/shoal-1a2b3c4d-20261116T030000Z.tar
      shoal salvage --home ~/try
    """
    import tempfile

    from shoal.cli.screen import show
    from shoal.control.backup.manifest import BackupError
    from shoal.control.backup.restoring import store_of
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
        with tempfile.TemporaryDirectory(prefix=".salvage-", dir=place.path) as folder:
            backup = None
            if from_ is not None:
                path = Path(from_).expanduser().absolute()
                backup = store_of(path, place, Path(folder), lambda *_: None)
            at_least = saving.booked(place.ledger)
            lines = saving.salvage(place.database, place.salvaged, numbers, at_least, backup)
        place.salvage_report.write_text("\n".join(lines) + "\n")
    except (StoreError, BackupError, OSError) as error:
        raise Failure(str(error)) from None
    if json:
        show.as_json({"lines": lines})
        return
    for line in lines:
        show.line(line)
    show.line(f"this list is also in {place.salvage_report}; next: shoal up --home {place.path}")
