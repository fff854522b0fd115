"""`shoal slurm-commands`: sbatch, srun and the like as commands that speak to Shoal."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.command import Argument, flag, verb
from shoal.forms.failure import REFUSED, Failure

MARK = "# Written by shoal slurm-commands."


@verb(
    Argument("folder", "DIR", "Where to write them; it should be in the PATH."),
    flag("--remove", help="Remove them again."),
)
def slurm_commands(folder: str, remove: bool, json: bool, home: Path) -> None:  # noqa: ARG001
    """Write sbatch, srun and the like, for Slurm scripts.

    It writes sbatch, srun, squeue, scancel, sacct and scontrol. Scripts with
    #SBATCH lines, and tools that call Slurm's commands, then run on Shoal
    (docs/slurm-commands.md). They use the Python that runs this
    command. A command that is there already, such as a real sbatch, is not replaced.

    Examples:
      shoal slurm-commands ~/bin
      shoal slurm-commands ~/bin --remove
    """
    import shlex
    import sys

    from shoal.cli.screen import show
    from shoal.cli.slurm.commands import COMMANDS

    place = Path(folder).expanduser()
    place.mkdir(parents=True, exist_ok=True)
    paths = [place / name for name in COMMANDS]
    strange = [path for path in paths if path.exists() and MARK not in path.read_text("latin-1")]
    if strange:
        raise Failure(f"DIR: {strange[0]} is another program; choose another folder", REFUSED)
    for path in paths:
        if remove:
            path.unlink(missing_ok=True)
            continue
        words = [sys.executable, "-P", "-m", "shoal.cli.slurm", path.name]
        path.write_text(f'#!/bin/sh\n{MARK}\nexec {shlex.join(words)} "$@"\n')
        path.chmod(0o755)
    if json:
        show.as_json([str(path) for path in paths])
    else:
        show.line(f"{'removed' if remove else 'wrote'} {', '.join(COMMANDS)} in {place}")
