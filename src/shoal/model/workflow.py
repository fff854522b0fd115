"""A job of a workflow, and what a workflow looks like from outside."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.job import JOB_NAME_PATTERN, JobSpec

WORKFLOW_JOBS_MAX = 1_000


class WorkflowJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`after` names other jobs of the workflow: NAME, NAME:ok, NAME:any or NAME:fail."""

    name: Annotated[str, msgspec.Meta(max_length=63, pattern=JOB_NAME_PATTERN)]
    spec: JobSpec
    after: tuple[Annotated[str, msgspec.Meta(max_length=80)], ...] = ()


class WorkflowSubmission(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`key` is chosen by the client: sending it again is safe and returns the same workflow."""

    jobs: tuple[WorkflowJob, ...]
    key: str = ""


class WorkflowNode(msgspec.Struct, kw_only=True):
    id: str
    name: str
    state: str
    why: str


class WorkflowEdge(msgspec.Struct, kw_only=True):
    """`after` starts when `before` has ended in this way: ok, any or fail."""

    before: str
    after: str
    when: str


class WorkflowView(msgspec.Struct, kw_only=True):
    """`state`: running while a job of it is live; then succeeded if all did, else ended."""

    id: str
    tenant: str
    state: str
    nodes: list[WorkflowNode]
    edges: list[WorkflowEdge]
