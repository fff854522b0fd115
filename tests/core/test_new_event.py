"""A new event is one declaration: the checklist "Add an event" of docs/extending.md, done once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Union

import msgspec
import pytest

from shoal.api.principal import THE_OPERATOR, Principal
from shoal.api.reach import Reach, seen_events
from shoal.calls.lines import EventLine
from shoal.cli.verbs.explain import print_event
from shoal.core.state.apply import apply
from shoal.core.state.events.base import EventBase, JobEvent
from shoal.core.state.events.log import Recorded, kinds_of, published
from shoal.core.state.state import State
from shoal.model.identity import Role
from tests.core.build import Cluster


def test_a_new_event_is_stored_applied_and_shown_by_its_declaration_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class JobCheered(JobEvent, frozen=True, kw_only=True):
        """Somebody hopes that the job succeeds."""

        who: str

        def apply(self, state: State) -> None:
            state.jobs[self.job].why = f"cheered on by {self.who}"

        def phrase(self) -> str:
            return f"was cheered on by {self.who}"

    cluster = Cluster()
    job = cluster.run(tenant="lab")
    event = JobCheered(at_ms=cluster.now_ms, job=job, who="ada")
    sentence = f"{job} was cheered on by ada"

    log: Any = msgspec.json.Decoder(Union[tuple(kinds_of(EventBase))])  # noqa: UP007
    assert log.decode(msgspec.json.encode(event)) == event

    apply(cluster.state, event)
    assert cluster.state.jobs[job].why == "cheered on by ada"

    record = Recorded(1, event)
    told = msgspec.json.encode(published([record])[0])
    print_event(msgspec.json.decode(told, type=EventLine), json=False)
    assert capsys.readouterr().out.endswith(f"{sentence}\n")

    loop: Any = SimpleNamespace(state=cluster.state, policy=cluster.policy)
    shown = {
        who.user: [one.text for one in published(seen_events(Reach(loop, who), [record]))]
        for who in (
            THE_OPERATOR,
            Principal(user="anna", tenant="lab", role=Role.MEMBER, token="abcdefgh"),
            Principal(user="eve", tenant="rival", role=Role.MEMBER, token="abcdefgh"),
        )
    }
    assert shown == {THE_OPERATOR.user: [sentence], "anna": [sentence], "eve": []}
