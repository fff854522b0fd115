"""A pip requirements file that is sent with a job: all of it, with the same meaning on a node."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.forms.failure import BadField
from shoal.model.job import REQUIREMENTS_BYTES_MAX

# Lines that name a file or folder of this machine, which a node may not have.
ELSEWHERE = re.compile(r"(-r|-c|--requirement|--constraint|-e|--editable)\b|\.{1,2}(/|$)")


def requirements_text(field: str, name: str) -> str:
    path = Path(name)
    if not path.is_file():
        what = "is not a file" if path.exists() else "there is no such file"
        raise BadField(field, f"{name}: {what}; name one like requirements.txt")
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadField(field, f"{name}: is not text (UTF-8)") from None
    except OSError as error:
        raise BadField(field, f"{name}: {error.strerror}") from None
    return checked_requirements(field, text, f"{name}: ", f"{name} ")


def checked_requirements(field: str, text: str, before: str = "", line_of: str = "") -> str:
    """The list itself; `before` and `line_of` name the file that it is from, if it is from one."""
    if len(text.encode("utf-8", "surrogatepass")) > REQUIREMENTS_BYTES_MAX or "\0" in text:
        limit = f"{REQUIREMENTS_BYTES_MAX // 1024} KiB"
        why = "holds a NUL byte" if "\0" in text else f"is longer than {limit}"
        raise BadField(field, f"{before}{why}, so it is not a requirements file")
    for number, line in enumerate(text.splitlines(), 1):
        if "://" not in line and ELSEWHERE.match(line.strip()):
            message = f"'{line.strip()[:60]}' names a file of this machine"
            fix = "nodes get only this list, so write its lines here, or give a whole path or URL"
            raise BadField(field, f"{line_of}line {number}: {message}; {fix}")
    if not any(line.strip() and not line.strip().startswith("#") for line in text.splitlines()):
        raise BadField(field, f"{before}lists no packages; leave it out")
    return text
