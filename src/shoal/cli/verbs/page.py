"""`shoal page`: the way into the page, without typing the token."""

from __future__ import annotations

import os
import sys

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption


def page(json: JsonOption = False, home: HomeOption = DEFAULT_HOME) -> None:
    """Print a link to the cluster's page that signs you in once.

    The link holds for two minutes and for one browser. At a terminal with a
    desktop it is opened, too. Whoever has the token may sign in with that.

    Examples:
      shoal page
      shoal page --json | jq -r .url
    """
    from shoal.cli import reach
    from shoal.cli.screen import show

    with reach.connect(home) as client:
        link = client.page_link()
    if json:
        show.as_json({"url": link})
        return
    show.line(link)
    if show.at_terminal() and _has_desktop():
        import webbrowser

        webbrowser.open(link)


def _has_desktop() -> bool:
    """A browser inside the terminal would be a surprise."""
    return sys.platform == "darwin" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
