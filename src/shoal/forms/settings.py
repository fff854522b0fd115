"""Files of settings that people write: the sign-in by OpenID Connect, and notices."""

from __future__ import annotations

import msgspec

from shoal.forms import datafile
from shoal.forms.datafile import check_names
from shoal.forms.failure import BadField
from shoal.model.notice import NoticeSettings
from shoal.model.people import GroupRule, OidcConfig, problem_with
from shoal.model.phrases import shortened

NAMES = tuple(field.name for field in msgspec.structs.fields(OidcConfig))
RULE_NAMES = tuple(field.name for field in msgspec.structs.fields(GroupRule))


def read(word: str) -> OidcConfig:
    return datafile.read_named(word, "file of settings", parse)


def parse(text: str, ending: str) -> OidcConfig:
    """ValueError names the field and the fix."""
    written = datafile.load(text, ending, "issuer: https://login.example.com")
    check_names(written, NAMES, f"there are {', '.join(NAMES)}")
    groups = written.get("groups", {})
    if not isinstance(groups, dict):
        raise BadField("groups", "must be names with roles, e.g. {lab-team: {tenant: lab}}")
    for name, rule in groups.items():
        where = f"groups.{shortened(str(name), 60)}"
        if not isinstance(rule, dict):
            raise BadField(where, "must be a table, e.g. {tenant: lab, role: member}")
        check_names(rule, RULE_NAMES, f"there are {', '.join(RULE_NAMES)}", where)
    written["groups"] = {str(name): rule for name, rule in groups.items()}
    try:
        config = msgspec.convert(written, OidcConfig)
    except msgspec.ValidationError as error:
        raise datafile.invalid(error) from None
    problem = problem_with(config)
    if problem is not None:
        raise BadField("", problem)
    return config


# The file that `shoal notify settings` reads.


NOTICE_NAMES = tuple(field.name for field in msgspec.structs.fields(NoticeSettings))


def read_notices(word: str) -> NoticeSettings:
    return datafile.read_named(word, "file of settings", parse_notices)


def parse_notices(text: str, ending: str) -> NoticeSettings:
    """ValueError names the field and the fix."""
    written = datafile.load(text, ending, "smtp: {host: mail.example.com, sender: me@example.com}")
    datafile.check_names(written, NOTICE_NAMES, f"there are {', '.join(NOTICE_NAMES)}")
    try:
        return msgspec.convert(written, NoticeSettings)
    except msgspec.ValidationError as error:
        raise datafile.invalid(error) from None
