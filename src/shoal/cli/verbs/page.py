"""`shoal page`: a link that signs the user in to the page."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shoal.cli.command import verb


@verb()
def page(json: bool, home: Path) -> None:
    """Print a link that signs you in to the cluster's page.

    The link works for two minutes, once. At a terminal with a desktop the page
    also opens in your browser. You can sign in with the token as well.

    Examples:
      shoal page
      shoal page --json | jq -r .url
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        link = client.page_link()
    if json:
        show.as_json({"url": link})
        return
    show.line(link)
    if show.at_terminal() and has_desktop():
        import webbrowser

        webbrowser.open(link)


def has_desktop() -> bool:
    """Without a desktop, a text browser might open in the terminal."""
    return sys.platform == "darwin" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
