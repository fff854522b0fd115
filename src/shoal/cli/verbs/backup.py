"""`shoal backup`, `shoal restore` and `shoal salvage`: save a cluster, and bring it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shoal.cli.command import Argument, Option, flag, number, verb
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.control.backup.manifest import Manifest, Progress
    from shoal.control.home import Home


SHOW_AFTER_S, BETWEEN_S = 2.0, 0.1
T = TypeVar("T")


@verb(
    Argument("target", "[FILE|FOLDER]", "Where to write it. [.]", required=False, default="."),
    Option(
        "--with",
        "with_",
        metavar="PARTS",
        help="Save these, too: logs, outputs, packages, checkpoints.",
        default="",
    ),
    Option(
        "--keep",
        metavar="N",
        help="Remove older backups of this cluster in FOLDER; keep the N newest.",
        type=number(1, 100_000),
        default=None,
    ),
    flag("--verify", help="Only verify the backup FILE, and show what is in it."),
    on_head=True,
)
def backup(target: str, with_: str, keep: int | None, verify: bool, json: bool, home: Path) -> None:
    """Back up the cluster to one file, while it runs.

    The file holds what the head remembers: jobs, events, policy, ledger, notices,
    users, keys, certificates and secrets. Packages of jobs that have not ended
    are in it, too. The cluster keeps running; it may also be down.
    In a folder, the file is named shoal-CLUSTER-TIME.tar. Bring the cluster back
    with `shoal restore`.

    Examples:
      shoal backup /mnt/backups
      shoal backup /mnt/backups --keep 14
      shoal backup /mnt/backups --with logs,outputs
      shoal backup --verify /mnt/backups/shoal-1a2b3c4d-20261116T030000Z.tar
    """
    from shoal.control.backup import manifest as backups
    from shoal.control.backup.saving import save
    from shoal.control.home import Home

    parts = [part.strip() for part in with_.split(",") if part.strip()]
    if unknown := [part for part in parts if part not in backups.PARTS]:
        choices = ", ".join(backups.PARTS)
        raise Failure(f"--with: there is no part '{unknown[0][:40]}'; use some of {choices}", USAGE)
    path = Path(target).expanduser().absolute()
    if verify:
        if parts or keep:
            raise Failure("--verify: cannot be combined with --with or --keep", USAGE)
        found = _run(lambda progress: backups.verify(path, progress), quiet=json)
        _show(found, path, "verified", json=json)
        return
    place = Home(home)
    if not place.config.exists():
        raise Failure(f"there is no cluster in {place.path}")
    _refuse_target(path, place, keep)
    if path.is_dir():
        import time

        path /= backups.name_of(place.cluster_id(), time.time_ns() // 1_000_000)
    made = _run(lambda progress: save(place, path, parts, progress), quiet=json)
    removed = backups.older(path.parent, made.cluster, keep) if keep else []
    for old in removed:
        old.unlink(missing_ok=True)
    _show(made, path, "saved", json=json, removed=[str(one) for one in removed])


@verb(
    Argument("file", "FILE", "A backup that `shoal backup` wrote."),
    flag("--replace", help="Put the files of this home aside first, and restore over them."),
    on_head=True,
)
def restore(file: str, replace: bool, json: bool, home: Path) -> None:
    """Restore a cluster from a backup.

    The file is verified first. The home must be empty, and its cluster down; with
    --replace, its files are put aside in a folder of the home, and logs, outputs
    and checkpoints stay where they are. Then start the cluster with `shoal up`.

    What happened after the backup is lost. Jobs that started later are stopped
    when their nodes report, and their ids are not given out again. Machines that
    reach the head by the same name and port come back by themselves.

    Examples:
      shoal restore /mnt/backups/shoal-1a2b3c4d-20261116T030000Z.tar
      shoal restore backup.tar --replace
      shoal restore backup.tar --home /srv/shoal
    """
    from shoal.cli.screen import show
    from shoal.control.backup.restoring import restore as put_back
    from shoal.control.home import Home

    path, place = Path(file).expanduser().absolute(), Home(home)
    done = _run(lambda shown: put_back(path, place, replace=replace, progress=shown), quiet=json)
    aside = str(done.aside) if done.aside else ""
    if json:
        made = _as_dict(done.manifest, path)
        show.as_json({**made, "first_job": done.first_job, "replaced": aside})
        return
    _show(done.manifest, path, "restored")
    if done.manifest.database:
        show.line(f"the events are in {done.manifest.database}: restore them there with pg_restore")
    else:
        show.line("what happened after that is lost; jobs that started later will be stopped")
        show.line("tokens and users that were removed after that are valid again: remove them")
        show.line(f"new jobs begin at j{done.first_job}")
    for name in done.left_out:
        show.note(f"left out: {name} is a link that leads out of the home")
    if aside:
        show.line(f"the files that were there are in {aside}")
    show.line(f"next: shoal up --home {place.path}")


def _refuse_target(path: Path, place: Home, keep: int | None) -> None:
    from shoal.control.backup import manifest as backups

    if keep and not path.is_dir():
        raise Failure(f"--keep: needs a folder, and {path} is not one", USAGE)
    if not path.parent.is_dir():
        raise Failure(f"there is no folder {path.parent}: make it first")
    if path.resolve().is_relative_to(place.path.resolve()):
        raise Failure(f"{path} is inside of the cluster's home: choose another place for it")
    if path.exists() and not path.is_dir():
        try:
            backups.read(path)
        except (backups.BackupError, OSError):
            message = f"{path} exists and is not a backup of Shoal"
            raise Failure(f"{message}: name another file, or a folder") from None


def _run(work: Callable[[Progress], T], *, quiet: bool) -> T:
    """With a line of progress on a terminal, if it takes long."""
    import sys
    import time

    from shoal.cli.screen.files import size_text
    from shoal.cli.screen.show import Spinner
    from shoal.control.backup.manifest import BackupError

    began, shown = time.monotonic(), 0.0
    with Spinner(quiet or not sys.stderr.isatty()) as spinner:

        def progress(what: str, done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if now - began > SHOW_AFTER_S and now - shown > BETWEEN_S:
                shown = now
                of = f" of {size_text(total)}" if total else ""
                spinner(f"{what}: {size_text(min(done, total or done))}{of}")

        try:
            return work(progress)
        except BackupError as error:
            raise Failure(str(error)) from None


def _show(
    manifest: Manifest, path: Path, done: str, *, json: bool = False, removed: Sequence[str] = ()
) -> None:
    from shoal.cli.screen import show
    from shoal.cli.screen.files import size_text
    from shoal.model.durations import moment_text
    from shoal.model.resources import plural

    if json:
        show.as_json({**_as_dict(manifest, path), "removed": list(removed)})
        return
    files = plural(len(manifest.members), "file")
    show.line(f"{done}: {path} ({files}, {size_text(manifest.bytes)})")
    if manifest.database:
        show.line("it holds the head's own files; save the database itself with: pg_dump")
    else:
        jobs = f"{plural(manifest.live_jobs, 'live job')}, {manifest.finished_jobs} finished"
        until = moment_text(manifest.newest_ms) if manifest.seq else "the beginning"
        show.line(f"cluster {manifest.cluster}: {jobs}, {manifest.seq} events, until {until}")
    if parts := ", ".join(manifest.parts):
        show.line(f"with {parts}")
    if removed:
        show.line(f"removed {plural(len(removed), 'older backup')}")
    show.line(
        f"{path.name} holds the cluster's keys and secrets: keep it where others cannot read it"
    )


def _as_dict(manifest: Manifest, path: Path) -> dict[str, object]:
    names = ("version", "cluster", "machine", "saved_ms", "parts", "database", "seq", "newest_ms")
    found: dict[str, object] = {"file": str(path), "bytes": manifest.bytes}
    found.update({name: getattr(manifest, name) for name in names})
    found.update({"live_jobs": manifest.live_jobs, "finished_jobs": manifest.finished_jobs})
    return found


# `shoal salvage`: recover what is readable from a damaged store.


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
    the nodes keep running. Then start the cluster with `shoal up`.

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
