"""Loads a tick's state, without the functions of users if they fail on it."""

from __future__ import annotations

import logging

from shoal.control import plugins
from shoal.ports import StoreError
from shoal.tick import Tick

log = logging.getLogger("shoal.control")


def load(tick: Tick) -> None:
    """The state must not be out of reach because a function that a policy names fails on it."""
    try:
        tick.load()
    except StoreError:
        raise
    except Exception as error:
        if not plugins.distrust(error):
            raise
        log.exception("the log cannot be replayed with the functions that the policy names")
        tick.load()
