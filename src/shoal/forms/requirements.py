"""A requirements file as it goes along with a job: whole, and meaning the same elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.model.job import REQUIREMENTS_BYTES_MAX

# Lines that name a file or folder of this machine, which a node need not have.
ELSEWHERE = re.compile(r"(-r|-c|--requirement|--constraint|-e|--editable)\b|\.{1,2}(/|$)")


class BadRequirements(ValueError):
    """What is wrong with the file, and how to mend it."""


def requirements_text(name: str) -> str:
    path = Path(name)
    if not path.is_file():
        what = "is not a file" if path.exists() else "there is no such file"
        raise BadRequirements(f"{name}: {what}; name one like requirements.txt")
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadRequirements(f"{name}: is not text (UTF-8)") from None
    except OSError as error:
        raise BadRequirements(f"{name}: {error.strerror}") from None
    if len(data) > REQUIREMENTS_BYTES_MAX:
        kib = REQUIREMENTS_BYTES_MAX // 1024
        raise BadRequirements(f"{name}: is longer than {kib} KiB; that is no requirements file")
    if "\0" in text:
        raise BadRequirements(f"{name}: holds a NUL byte; that is no requirements file")
    for number, line in enumerate(text.splitlines(), 1):
        if "://" not in line and ELSEWHERE.match(line.strip()):
            told = line.strip()[:60]
            raise BadRequirements(
                f"{name} line {number}: '{told}' names a file of this machine, and the nodes get "
                "this list alone; write its lines here, or give a whole path or URL"
            )
    if not any(line.strip() and not line.strip().startswith("#") for line in text.splitlines()):
        raise BadRequirements(f"{name}: asks for nothing; leave it out")
    return text
