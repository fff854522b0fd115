"""What a reader sees of a reason: names of others are parts, and no text passes for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.model.reason import (
    BEGIN,
    BREAK,
    END,
    OPERATOR,
    Reader,
    job_part,
    job_words,
    private,
    quoted,
    render,
    tenant_part,
)

LAB = Reader("lab", above=("science",))
OWN, OTHER = job_part("lab", "j1", "j1 (mine)"), job_part("rival", "j3", "j3 (secret)")
NAMES = ["job", "gpu", "waiting", "j7", "a b", ".*", "[a-z]+", "lab.", "another", "tenant's", "\\j"]
name = st.sampled_from(NAMES)
foreign = st.builds(job_part, name.map("{}-rival".format), st.just("j3"), name.map("{}-job".format))
own = st.builds(job_part, st.just("lab"), st.just("j1"), name.map("{}-own".format))
tenant = name.map("{}-rival".format).map(tenant_part)
words = st.text(st.sampled_from(f"ab ,;j1{BEGIN}{BREAK}{END}"), max_size=12).map(quoted)
plain = st.sampled_from(["waits for ", ", ", "; ", " and ", " (", ")"])
hidden = st.lists(foreign | tenant | words | plain).map("".join).map(private)
reasons = st.lists(foreign | own | tenant | words | plain | hidden)


@pytest.mark.parametrize(
    ("reason", "operators", "labs"),
    [
        ("no node has 4 GPUs", "no node has 4 GPUs", "no node has 4 GPUs"),
        (f"for {OWN}; x", "for j1 (mine); x", "for j1 (mine); x"),
        (f"for {OTHER}; x", "for j3 (secret); x", "for another tenant's job; x"),
        (f"{OTHER}, {OTHER}, {OTHER}, {OWN}", None, "other tenants' jobs, j1 (mine)"),
        (f"{OTHER}, {OWN}, {OTHER}", None, "another tenant's job, j1 (mine), another tenant's job"),
        (f"the budget of {tenant_part('rival')}", None, "the budget of another tenant"),
        (f"the budget of {tenant_part('science')}", None, "the budget of science"),
        (f"suspect{private(f' ({OTHER} hung)')}; x", "suspect (j3 (secret) hung); x", "suspect; x"),
        (f"it says {quoted('j3 failed')}", "it says j3 failed", "it says j3 failed"),
        (f"cut {OTHER}"[:-3], "cut j3 (secre", "cut another tenant's job"),
        (f"cut {OTHER}"[:8], "cut ", "cut another tenant's job"),
        (f"x{END}y", "xy", "xy"),
    ],
)
def test_a_reason_for_its_reader(reason: str, operators: str | None, labs: str) -> None:
    assert operators is None or render(reason, OPERATOR) == operators
    assert render(reason, LAB) == labs


def test_the_policy_may_let_tenants_be_named() -> None:
    reader = Reader("lab", tenants=True)
    assert render(f"for {OTHER}", reader) == "for a job of tenant rival"
    assert render(f"of {tenant_part('rival')}", reader) == "of rival"


def test_jobs_of_an_earlier_tenant_of_the_same_name_are_those_of_others() -> None:
    assert render(f"for {OWN}", Reader("lab", first_job=2)) == "for another tenant's job"


@given(reasons)
def test_no_name_of_others_is_in_what_a_tenant_reads(parts: list[str]) -> None:
    shown = render("".join(parts), LAB)
    assert "-rival" not in shown and "-job" not in shown
    assert not {BEGIN, BREAK, END} & set(shown)


@given(reasons)
def test_an_operator_reads_every_word(parts: list[str]) -> None:
    assert render("".join(parts)) == "".join(render(part) for part in parts)


def test_words_that_look_like_jobs() -> None:
    assert job_words("j3 (secret), j1.2 and proj3, j3x") == ["j3", "j1"]
    assert not job_words("just a job")
