"""Variables by which experiment trackers recognise a job (docs/python.md).

Only what labels and groups runs is set. Which run a process continues stays the script's decision:
a script may track several runs, and with a run id in the environment all of them would become one.
"""

from __future__ import annotations

import msgspec

from shoal.model.job import Job


def run_id(job: Job) -> str:
    """Of this job for ever, over all its attempts. Job ids alone begin again with each cluster."""
    return f"{job.id}-{job.submitted_ms:x}"


def for_trackers(job: Job) -> dict[str, str]:
    """Defaults; the variables of the job win."""
    array = job.id.partition(".")[0]  # elements of an array are one group
    prefix = f"{job.spec.name}-" if job.spec.name else ""
    tags = {"shoal.run_id": run_id(job), "shoal.job": job.id, "shoal.tenant": job.spec.tenant}
    return {
        "WANDB_RUN_GROUP": f"{prefix}{array}",
        "WANDB_NAME": f"{prefix}{job.id}",
        "MLFLOW_RUN_CONTEXT": msgspec.json.encode(tags).decode(),
    }
