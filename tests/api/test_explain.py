"""What is told of a job does not depend on how often it saved."""

from __future__ import annotations

from pathlib import Path

from shoal.api.jobs import explanation_of, why_view
from shoal.api.principal import THE_OPERATOR
from shoal.api.reach import Reach
from shoal.core.state.events.runs import JobCheckpointed, JobRunning
from shoal.model.report import Submit
from tests.control.test_loop import SPEC, Rig


def test_thousands_of_checkpoints_hide_no_attempt(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def begin() -> None:
        await rig.loop.request(Submit(SPEC))
        while not any(isinstance(r.event, JobRunning) for r in rig.store.events(0, 99, "j1")):
            await rig.loop.changed("j1", 1)

    rig.run(begin())
    reach = Reach(rig.loop, THE_OPERATOR)
    before = why_view(reach, rig.loop.state.jobs["j1"])
    saves = [
        JobCheckpointed(at_ms=2_000_000 + step, job="j1", attempt=1, step=step)
        for step in range(1, 25_001)
    ]
    rig.store.commit(saves, [])
    after = why_view(reach, rig.loop.state.jobs["j1"])
    assert [r.event for r in after.events] == [*(r.event for r in before.events), saves[-1]]
    assert after.events[-1].text == "j1 saved its work up to step 25000"
    (attempt,) = after.attempts
    assert (attempt.attempt, attempt.nodes, attempt.saved_step) == (1, ["n1"], 25_000)
    story = explanation_of(reach, rig.loop.state.jobs["j1"])
    assert story.complete
    assert [one.saved_step for one in story.attempts] == [25_000]
