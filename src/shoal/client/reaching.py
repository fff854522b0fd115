"""What a client knows of a cluster's heads: where they are, which one answered last, and how many
events of the log it has seen. Threads may share it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from shoal.client.transport import Endpoint, ShoalError, at

SEQ = "shoal-seq"  # in an answer: its newest event; in a request: the newest that the client saw
HEADS = "shoal-heads"  # in an answer: the URLs of all heads, if there are several
STANDBY = "shoal-standby"  # in a standby's answer that is not the leader's: why
AS_OF = "shoal-as-of"  # in an answer without a leader: when the log was last followed
LEADER = "shoal-leader"  # in a refusal of a node's link: where to dial instead
HEADS_MAX = 16
HEADS_CHARS_MAX = 4096
DIGITS_MAX = 18


class Reaching:
    """`remember` gets what should be known the next time: `heads` that were not known before, or
    the `last` URL that answered."""

    def __init__(
        self, endpoint: Endpoint, remember: Callable[..., None] = lambda **_: None
    ) -> None:
        self._guard, self._pid = threading.Lock(), os.getpid()
        self._endpoint = endpoint
        self._remember = remember
        self._urls = endpoint.all_urls
        self._at = 0
        self._settled = endpoint.url  # answered last
        self._heads = endpoint.heads
        self._seq = 0

    @property
    def several(self) -> bool:
        return len(self._urls) > 1

    @property
    def count(self) -> int:
        return len(self._urls)

    @property
    def current(self) -> Endpoint:
        with self._lock():
            url = self._urls[self._at]
        return self._endpoint if url == self._endpoint.url else self._endpoint.moved_to(url)

    @property
    def seq(self) -> int:
        return self._seq

    def _lock(self) -> threading.Lock:
        if self._pid != os.getpid():  # it may have been held when the process was forked
            self._guard, self._pid = threading.Lock(), os.getpid()
        return self._guard

    def next(self, failed: str) -> None:
        """The head at this URL did not answer, or has no leader. Another thread may have moved on
        already."""
        with self._lock():
            if self._urls[self._at] == failed:
                self._at = (self._at + 1) % len(self._urls)

    def answered(self, url: str, seq: str, heads: str) -> None:
        """With what the headers of the answer say."""
        if url != self._settled:
            self._settled = url
            self._remember(last=url)
        if seq.isdigit() and len(seq) <= DIGITS_MAX:
            with self._lock():
                self._seq = max(self._seq, int(seq))
        if heads:
            self._learn(heads)

    def _learn(self, text: str) -> None:
        heads = acceptable(self._endpoint, text)
        if not heads or heads == self._heads:
            return
        with self._lock():
            current = self._urls[self._at]
            named = (self._endpoint.url, *self._endpoint.urls)
            self._urls = tuple(dict.fromkeys((*named, *heads, current)))
            self._at = self._urls.index(current)
            self._heads = heads
        self._remember(heads=heads)


def acceptable(endpoint: Endpoint, text: str) -> tuple[str, ...]:
    """The URLs in a list from a head, without those that would be less safe than the one in use."""
    if endpoint.socket is not None or len(text) > HEADS_CHARS_MAX:
        return ()
    found = []
    for one in text.split(",")[:HEADS_MAX]:
        try:
            other = at(one.strip(), "")
        except ShoalError:
            continue
        if other.secure or (not endpoint.secure and is_loopback(other.host)):
            found.append(other.url)
    return tuple(dict.fromkeys(found))


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
