#!/usr/bin/env python3
"""Prints user data for an instance that joins a cluster.

    ./render.py https://head:7700 join-token pool=a100 zone=b > user-data.yaml

The second argument is the file with the join token, the others are the node's labels.
"""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent


def render(url: str, token: str, labels: list[str]) -> str:
    """Whatever goes into a file of systemd or YAML there is checked here, not quoted."""
    if not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]-]+", url):
        raise SystemExit(f"{url!r} is not the address of a head, such as https://head:7700")
    if not re.fullmatch(r"[A-Za-z0-9_.:-]+", token):
        raise SystemExit("the file holds no join token")
    for label in labels:
        if not re.fullmatch(r"[A-Za-z0-9._/-]+=[A-Za-z0-9._-]*", label):
            raise SystemExit(f"{label!r} is not a label, such as pool=a100")
    notices = base64.b64encode((HERE / "notices.py").read_bytes()).decode()
    text = (HERE / "node.yaml").read_text()
    words = {"URL": url, "TOKEN": token, "NOTICES": notices}
    words["LABELS"] = "".join(f" --label {label}" for label in labels)
    head, _, body = text.partition("package_update")  # the comment names the words, too
    for word, value in words.items():
        body = body.replace(f"@{word}@", value)
    return f"{head}package_update{body}"


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    print(render(sys.argv[1], Path(sys.argv[2]).read_text().strip(), sys.argv[3:]), end="")
