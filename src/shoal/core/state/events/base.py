"""What every event declares: what it does, to what, in which words, and who may see it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, Self

import msgspec

from shoal.core.state.state import State
from shoal.model.phrases import printable
from shoal.model.policy import Policy


class Reader(Protocol):
    """Somebody to whom events are shown."""

    @property
    def admin(self) -> bool: ...

    @property
    def sees_all(self) -> bool:
        """What all tenants do."""

    def sees_job(self, job: str) -> bool: ...

    def sees_tenant(self, tenant: str, at_ms: int) -> bool:
        """Whether the tenant that had this name then is the reader's."""

    def sees_service(self, service: str, at_ms: int) -> bool: ...

    def policy(self, policy: Policy) -> Policy:
        """As far as it concerns the reader."""

    def text(self, reason: str) -> str:
        """The reason as the reader may read it."""


class EventBase(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """All events of one step carry the same `at_ms`."""

    # So frequent that it would fill any short list of events. The store indexes all the others by
    # their names: drop that index when you change this.
    quiet: ClassVar[bool] = False

    at_ms: int

    def apply(self, state: State) -> None:
        """Change the facts and the indexes: `apply(state, event)` calls this, and nothing else."""
        raise NotImplementedError

    def services(self, state: State) -> Iterable[str]:  # noqa: ARG002
        """The services that may have something to do after it. `state`: before it."""
        return ()

    @property
    def subject(self) -> str:
        """What it happened to, as the beginning of the sentence."""
        raise NotImplementedError

    def phrase(self) -> str:
        """The rest of the sentence, without a full stop."""
        raise NotImplementedError

    def sentence(self) -> str:
        """What the terminal, the page and everybody else show of it."""
        return printable(f"{self.subject} {self.phrase()}")

    def without_secrets(self) -> Self:
        """As views show it: some things in the log are for nobody's eyes."""
        return self

    def visible_to(self, reader: Reader) -> bool:
        raise NotImplementedError

    def concealed(self, reader: Reader) -> Self:
        """For a reader who does not see all: without what belongs to others."""
        return self.rendered(reader)

    def rendered(self, reader: Reader) -> Self:
        why: Any = getattr(self, "why", "")
        shown = reader.text(why)
        return self if shown == why else msgspec.structs.replace(self, why=shown)

    def shown_to(self, reader: Reader) -> Self | None:
        """As the reader may see it; None: not at all."""
        if not self.visible_to(reader):
            return None
        return self.rendered(reader) if reader.sees_all else self.concealed(reader)


class JobEvent(EventBase, frozen=True, kw_only=True):
    job: str

    def services(self, state: State) -> Iterable[str]:
        if self.job not in state.jobs:
            return ()
        name = state.jobs[self.job].spec.service
        return (name,) if name else ()

    @property
    def subject(self) -> str:
        return self.job

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_job(self.job)


class ClusterEvent(EventBase, frozen=True, kw_only=True):
    """Everybody may see what happens to the cluster as a whole."""

    def services(self, state: State) -> Iterable[str]:
        return state.services

    def visible_to(self, reader: Reader) -> bool:  # noqa: ARG002
        return True


class NodeEvent(ClusterEvent, frozen=True, kw_only=True):
    node: str
    why: str = ""

    @property
    def subject(self) -> str:
        return self.node
