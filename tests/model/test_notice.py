"""Wishes for notices: how they are read, and that nothing secret of them is shown."""

from __future__ import annotations

import pytest

from shoal.model.notice import Wanted, What, masked, secret_of, wanted_of


@pytest.mark.parametrize(
    ("wish", "wanted"),
    [
        ("https://x.org/a?b=c", Wanted((What.ENDED,), 0, "https://x.org/a?b=c")),
        ("failed=@hook", Wanted((What.FAILED,), 0, "@hook")),
        ("waiting=slack:@hook", Wanted((What.WAITING,), 3_600_000, "slack:@hook")),
        (
            "started,waiting:1h30m=mail:me@x.org",
            Wanted((What.STARTED, What.WAITING), 5_400_000, "mail:me@x.org"),
        ),
    ],
)
def test_a_wish_says_what_and_where(wish: str, wanted: Wanted) -> None:
    assert wanted_of(wish) == wanted


@pytest.mark.parametrize(
    "wish",
    [
        *("", "failed", "failed=", "sometimes=https://x.org", "ftp://x.org", "waiting:1=@a"),
        *(
            "https://x.org/a b",
            "https://x.org\n",
            "mail:me",
            "mail:me@x.org\r\nBcc: you",
            "@../key",
        ),
    ],
)
def test_what_is_not_a_wish_is_refused(wish: str) -> None:
    with pytest.raises(ValueError, match="WHAT=WHERE"):
        wanted_of(wish)


@pytest.mark.parametrize(
    ("wish", "shown"),
    [
        ("https://user:pass@x.org:8443/T0/B0/key?k=v", "https://x.org:8443/..."),
        ("failed=slack:https://hooks.slack.com/T0/key", "failed=slack:https://hooks.slack.com/..."),
        ("http://[::1]:9/", "http://[::1]:9"),
        ("https://x.org?key", "https://x.org/..."),
        ("https://x.org#key", "https://x.org/..."),
        ("ended=@hook", "ended=@hook"),
        ("mail:me@x.org", "mail:me@x.org"),
    ],
)
def test_a_wish_is_shown_without_its_secrets_and_is_still_a_wish(wish: str, shown: str) -> None:
    assert masked(wish) == shown
    assert wanted_of(shown).on == wanted_of(wish).on


def test_a_receiver_may_be_the_name_of_a_secret() -> None:
    assert [secret_of(to) for to in ("@a", "slack:@b", "https://x.org/@c")] == ["a", "b", ""]
