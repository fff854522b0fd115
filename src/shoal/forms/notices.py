"""The file that `shoal notify settings` reads."""

from __future__ import annotations

import msgspec

from shoal.forms import datafile
from shoal.model.notice import NoticeSettings

NAMES = tuple(field.name for field in msgspec.structs.fields(NoticeSettings))


def read(word: str) -> NoticeSettings:
    return datafile.read_named(word, "file of settings", parse)


def parse(text: str, ending: str) -> NoticeSettings:
    """ValueError names the field and the fix."""
    written = datafile.load(text, ending, "smtp: {host: mail.example.com, sender: me@example.com}")
    datafile.check_names(written, NAMES, f"there are {', '.join(NAMES)}")
    try:
        return msgspec.convert(written, NoticeSettings)
    except msgspec.ValidationError as error:
        raise datafile.invalid(error) from None
