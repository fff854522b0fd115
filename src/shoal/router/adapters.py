"""Which adapters (LoRA) a replica has loaded, and what another one would cost there. Pure: times
are given, in seconds."""

from __future__ import annotations

from shoal.router.choice import LOAD_TOKENS, SWAP_TOKENS

HOLD_S = 30.0  # an adapter that was used so recently is not dropped while another choice is left


class Adapters:
    def __init__(self) -> None:
        self.loaded: dict[str, float] = {}  # -> last used; those that are being loaded, too
        self.users: dict[str, int] = {}  # requests under way
        self.always: frozenset[str] = frozenset()  # loaded by the engine itself when it started

    def price(self, name: str, most: int, now: float) -> int | None:
        """What a request for it costs beside its prompt, in tokens; None if requests under way use
        all that may be loaded."""
        if not name or name in self.loaded or name in self.always:
            return 0
        if len(self.loaded) < max(1, most):
            return LOAD_TOKENS
        victim = self.victim()
        if victim is None:
            return None
        return SWAP_TOKENS if now - self.loaded[victim] < HOLD_S else LOAD_TOKENS * 2

    def victim(self) -> str | None:
        """What may go: the one that was used longest ago, and that no request uses."""
        free = [name for name in self.loaded if not self.users.get(name)]
        return min(free, key=lambda name: self.loaded[name], default=None)

    def use(self, name: str, most: int, now: float) -> str | None:
        """A request takes it. What has to be dropped before it is loaded, if anything."""
        gone = None
        if name not in self.always:
            if name not in self.loaded and len(self.loaded) >= max(1, most):
                gone = self.victim()
            if gone is not None:
                del self.loaded[gone]
            self.loaded[name] = now
        self.users[name] = self.users.get(name, 0) + 1
        return gone

    def done(self, name: str, now: float) -> None:
        if name in self.loaded:
            self.loaded[name] = now
        left = self.users.pop(name, 1) - 1
        if left > 0:
            self.users[name] = left

    def drop(self, name: str) -> None:
        self.loaded.pop(name, None)
