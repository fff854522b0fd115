"""`python -m shoal.cli.slurm sbatch ...`: what the installed commands run."""

from __future__ import annotations

import sys

from shoal.cli.slurm.commands import main

sys.exit(main(sys.argv[1:]))
