"""The table of calls: each has one handler, which takes and gives what the call declares."""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from shoal.api.app import ROUTES
from shoal.api.http import Response
from shoal.api.routing import handlers_of
from shoal.calls.call import WEBSOCKET, Call, Calls, Head, Needs, Request, call, declared
from shoal.calls.jobs import JobCalls
from shoal.calls.page import PageCalls
from shoal.calls.table import TABLE, match
from shoal.model.finding import JobFilter
from shoal.model.job import JobSpec

HANDLERS = {repr(handler.call): handler for handler in handlers_of(ROUTES)}


def test_every_call_has_one_handler_and_every_handler_a_call() -> None:
    found = [repr(handler.call) for handler in handlers_of(ROUTES)]
    assert sorted(found) == sorted(map(repr, TABLE))


@pytest.mark.parametrize("call", TABLE, ids=repr)
def test_a_handler_takes_and_gives_what_its_call_declares(call: Call) -> None:
    function = HANDLERS[repr(call)].fn
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    assert set(call.path_names) <= set(parameters)
    query = {**call.query, **dict.fromkeys(call.headed)}
    for name, default in query.items():
        given = parameters[name].default
        if name not in call.headed:
            assert (... if given is inspect.Parameter.empty else given) == default, name
    given = set(parameters) - set(call.path_names) - {"self", "data"}
    optional = {name for name in given if parameters[name].default is not inspect.Parameter.empty}
    assert optional <= set(query)
    if "data" in hints and call.body is not Any:
        assert hints["data"] == call.body
    if call.answer is not Any and call.method != WEBSOCKET:
        answer = hints["return"]
        if get_origin(answer) is Response:
            (answer,) = get_args(answer)
        known = answer == call.answer or call.answer in (bytes, None)
        assert known, f"{answer} is not {call.answer}"


@pytest.mark.parametrize("call", TABLE, ids=repr)
def test_the_path_of_each_call_finds_it_again(call: Call) -> None:
    names = {name: f"some-{name}" for name in call.path_names}
    path = "".join(f"/{names.get(name, text)}" for text, name in call.parts)
    assert match(call.method, path) == (call, names)


def test_a_path_that_no_call_has_is_not_found() -> None:
    assert match("GET", "/v1/jobs/j1/") is None
    assert match("GET", "/v1/jobs//why") is None
    assert match("DELETE", "/v1/jobs") is None
    assert match("GET", "/v1/jobs/j1/why/not") is None


def test_what_changes_something_is_for_the_leader() -> None:
    changing = [one for one in TABLE if one.method not in ("GET", WEBSOCKET)]
    assert [one for one in changing if one.head is not Head.LEADER] == []
    assert [one for one in TABLE if not one.text] == []


# -- requests ---------------------------------------------------------------------------------


class Sent(JobCalls, PageCalls):
    def _send(self, call: Call, request: Request) -> Any:
        return request


SENT: Any = Sent()


def test_only_arguments_that_differ_from_their_defaults_are_sent() -> None:
    assert SENT.job("j1") == Request("/v1/jobs/j1")
    assert SENT.job("a/b", wait_s=2.5) == Request("/v1/jobs/a%2Fb?wait_s=2.5")
    wanted = JobFilter(states=("running", "failed"), labels=("a=b", "!c"), node="n1")
    query = "finished=true&state=running%2Cfailed&label=a%3Db&label=%21c&on_node=n1"
    assert SENT.jobs(finished=True, wanted=wanted) == Request(f"/v1/jobs?{query}")
    assert SENT.job_series("j1", members=False).path == "/v1/jobs/j1/series?members=false"


def test_a_submission_has_a_key_and_no_fields_at_their_defaults() -> None:
    request = SENT.submit(JobSpec(command=("true",)), key="k")
    assert request == Request("/v1/jobs", b'{"spec":{"command":["true"]},"key":"k"}')
    keys = {SENT.submit(JobSpec(command=("true",))).body for _ in range(2)}
    assert len(keys) == 2


def test_wrong_arguments_are_refused_as_python_does() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'job_id'"):
        SENT.cancel()
    with pytest.raises(TypeError, match="unexpected keyword argument 'jbo'"):
        SENT.cancel(jbo="j1")


def test_a_call_that_names_its_parameter_otherwise() -> None:
    class More(Calls):
        @call(
            "PUT", "/v1/things/{thing_id}", Needs.WRITE, body="value", renamed={"thing": "thing_id"}
        )
        def set_thing(self, thing: str, value: bytes, *, tenant: str = "") -> None:
            """Sets it."""

        def _send(self, call: Call, request: Request) -> Any:
            return request

    sent: Any = More()
    request = sent.set_thing(thing="a", value=b"\0", tenant="t")
    assert request.path == "/v1/things/a?tenant=t"
    assert request.body == b"\0"
    assert request.headers == {"Content-Type": "application/octet-stream"}
    assert declared(More.set_thing).path_names == ("thing_id",)
