"""The functions that come with Shoal, by the names that policies use."""

from __future__ import annotations

from shoal.core.scheduling.order import ORDERS
from shoal.core.scheduling.score import PLACEMENTS
from shoal.core.state.state import Functions

FUNCTIONS = Functions(ORDERS, PLACEMENTS, "fair", "shoal")
