"""What a service lists does not depend on one replica."""

from __future__ import annotations

from tests.router.world import Engine, Router


def test_models_are_listed_while_a_replica_is_dead(router: Router, engines: list[Engine]) -> None:
    """Whichever is asked first: none of the requests meets the dead one alone."""
    router.serve(*engines)
    before = router.ask("/v1/models", None).json
    engines[0].kill()
    answers = [router.ask("/v1/models", None) for _ in range(6)]
    assert [each.status for each in answers] == [200] * 6
    assert [each.json for each in answers] == [before] * 6
    failures = {name: one.failures for name, one in router.tell().services["chat"].replicas.items()}
    assert failures["b"] == 0
