"""The key by which the hosts of a tour know each other.

The state may not hold it, because `step` is pure and a key that follows from the state could be
guessed. So it is added on the way to the nodes. It need not outlive the controller, because tours
do not either.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from shoal.model.commands import Check, Command, Envelope
from shoal.tick import Send


class TourKeys:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._secret = secrets.token_bytes(32)

    def send(self, node: str, envelope: Envelope) -> None:
        """All hosts of one tour get the same key, those of another tour another one."""
        if any(isinstance(command, Check) and command.tour for command in envelope.commands):
            commands = tuple(self._keyed(command) for command in envelope.commands)
            envelope = msgspec.structs.replace(envelope, commands=commands)
        self._send(node, envelope)

    def _keyed(self, command: Command) -> Command:
        if not isinstance(command, Check) or command.tour is None:
            return command
        key = hmac.new(self._secret, command.id.encode(), hashlib.sha256).hexdigest()
        return msgspec.structs.replace(command, tour=msgspec.structs.replace(command.tour, key=key))
