"""Calls about other clusters that run jobs of this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.calls.call import Calls, Needs, call
from shoal.model.neighbor_views import GoneView, NeighborView, NewNeighbor
from shoal.model.views import Done

if TYPE_CHECKING:
    from shoal.calls.histories import SharedView


class NeighborCalls(Calls):
    @call("GET", "/v1/neighbors", Needs.READ)
    def neighbors(self) -> list[NeighborView]:
        """Other clusters to which jobs may go: what they offer, and what of ours is there."""

    @call("GET", "/v1/neighbors/shared", Needs.READ, late="shoal.calls.histories")
    def shared(self) -> SharedView:
        """This cluster's side: its price, who may send jobs, what was moved lately and why."""

    @call("PUT", "/v1/neighbors/{name}", Needs.ADMIN, body=NewNeighbor)
    def set_neighbor(self, name: str, url: str, token: str) -> NeighborView:
        """Adds a neighbor, if it answers and accepts the token; or changes its URL and token."""

    @call("GET", "/v1/neighbors/{name}/gone", Needs.ADMIN)
    def neighbor_gone(self, name: str) -> GoneView:
        """What it would mean to declare a neighbor gone."""

    @call("DELETE", "/v1/neighbors/{name}", Needs.ADMIN)
    def remove_neighbor(self, name: str, *, gone: bool = False) -> Done:
        """Forgets a neighbor that has no job of ours. `gone`: it will never answer again, so that
        our jobs there wait here again, though they may still run there."""
