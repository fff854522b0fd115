"""Bringing a cluster up and taking it down, from outside of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.client import Address
from shoal.control.home import ClusterConfig, Home

Progress = Callable[[str], None]


class LifecycleError(Exception):
    """The cluster could not be brought up or down; the message says why and what to do."""


class Up(msgspec.Struct, frozen=True):
    """`already`: it was up before, and nothing was changed."""

    address: Address
    already: bool


def bring_up(home: Home, config: ClusterConfig | None, progress: Progress) -> Up:
    """Start the controller and the nodes, and return when all of them are ready.

    Without a config, the one of last time is used, or else this machine as a single node. On a
    cluster that is up, an equal config (or none) changes nothing and another one is refused.
    """
    raise NotImplementedError


def take_down(home: Home, progress: Progress) -> int:
    """Stop the controller, then the nodes with all that runs on them; returns how many processes
    (controller and nodes) were stopped. Jobs stay in the store and go on at the next `up`."""
    raise NotImplementedError
