"""The number of the format in which this version stores and reads events, snapshots and jobs.

It is raised once for a release that stores something which earlier versions would misread or drop:
another event, another field. A database holds the highest number that has written to it, and a
version with a lower one refuses to open it. A folder of a node holds it, too.
`tests/model/test_format.py` fails if something was added and the number was not raised.
"""

from __future__ import annotations

import sys

# Not imported by its name: the package stands above all others, because it offers their classes.
VERSION = str(sys.modules["shoal"].__version__)
FORMAT = 2  # 0.6.0 is the first version that writes it down, as 1


def newer_text(name: str, version: str, number: int) -> str:
    """Why data with this number is refused, and what to do."""
    written = f"shoal {version}" if version else "a newer version of shoal"
    return (
        f"{name} was written by {written} (format {number}); this is {VERSION} (format "
        f"{FORMAT}): install {version or 'that version'} or newer, or restore a backup"
    )


def packed_version(version: str = VERSION) -> int:
    """0.6.1 as one number, 6001, because a database keeps it in a column of integers."""
    parts = ([*version.split("+")[0].split("."), "0", "0"])[:3]
    digits = ["".join(filter(str.isdigit, part)) or "0" for part in parts]
    major, minor, patch = map(int, digits)
    return (major * 1000 + minor) * 1000 + patch


def version_of(packed: int) -> str:
    """Empty if it is not known."""
    if packed <= 0:
        return ""
    return f"{packed // 1_000_000}.{packed // 1000 % 1000}.{packed % 1000}"
