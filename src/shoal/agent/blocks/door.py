"""The door of a node: gives blocks of what the node holds to those who have a ticket of the head.

A process of its own, run by the agent as `python -m shoal.agent.blocks.door` when there is first
something to offer. It makes a certificate and a secret, prints them with its port, and reads from
its input what it may give away (`Offer`). It ends with its input. A stranger, or a node whose
ticket is not for this set, gets no byte. Whoever fetches knows the certificate's fingerprint, so
that a program that took over the port passes nothing off.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime, timedelta

import msgspec

from shoal.agent.blocks import store
from shoal.agent.blocks.pace import Pace
from shoal.agent.blocks.store import Offer, Speed
from shoal.model.blocks import Door as DoorAt
from shoal.model.blocks import Layout, decode_manifest, ticket

log = logging.getLogger("shoal.blocks")

LINES_MAX = 32  # connections; a node that is turned away asks elsewhere, or again
HELLO_S = 5.0  # within this time, whoever connected has shown its ticket
REST_S = 60.0  # a line without a request is closed
PART_BYTES = 256 << 10  # what is sent at a time, if the node must not send fast
HELLO_BYTES_MAX = 4096
HELLO = struct.Struct("!H")
REQUEST = struct.Struct("!I")  # the number of a block, or this:
WANTS_MANIFEST = 0xFFFFFFFF
ANSWER = struct.Struct("!?I")  # here it is, and so many bytes follow; or it is not here
LAYOUTS_MAX = 16  # in memory


class Hello(msgspec.Struct, frozen=True, array_like=True):
    key: str
    node: str
    until_s: int
    ticket: bytes


class Door:
    """In a thread for each line. `at`: what the head has to know."""

    def __init__(self, port: int = 0) -> None:
        self._offers: dict[str, Offer] = {}
        self._layouts: dict[Offer, Layout] = {}
        self._lock = threading.Lock()
        self._lines = 0
        self.pace = Pace()
        self._secret = secrets.token_bytes(32)
        self._context, fingerprint = certificate()
        self._socket = listen(port)
        self.at = DoorAt(self._socket.getsockname()[1], fingerprint, self._secret)

    def offer(self, offer: Offer) -> None:
        with self._lock:
            before = self._offers.pop(offer.key, None)
            if before is not None:
                self._layouts.pop(before, None)
            if offer.folder:
                self._offers[offer.key] = offer

    def start(self) -> None:
        threading.Thread(target=self._serve, name="door", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                time.sleep(0.1)  # too many open files: those who come again are served
                continue
            with self._lock:
                full = self._lines >= LINES_MAX
                self._lines += not full
            if full:
                line.close()
            else:
                threading.Thread(target=self._receive, args=(line,), daemon=True).start()

    def _receive(self, plain: socket.socket) -> None:
        try:
            plain.settimeout(HELLO_S)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with plain, self._context.wrap_socket(plain, server_side=True) as line:
                offer = self._admit(line)
                if offer is not None:
                    line.settimeout(REST_S)
                    self._give(line, offer)
        except (OSError, ValueError, msgspec.DecodeError):
            pass  # a stranger, or somebody who hung up
        finally:
            with self._lock:
                self._lines -= 1

    def _admit(self, line: ssl.SSLSocket) -> Offer | None:
        (length,) = HELLO.unpack(exactly(line, HELLO.size))
        if length > HELLO_BYTES_MAX:
            return None
        hello = msgspec.msgpack.decode(exactly(line, length), type=Hello)
        expected = ticket(self._secret, hello.key, hello.node, hello.until_s)
        if not hmac.compare_digest(expected, hello.ticket) or hello.until_s < time.time():
            return None
        with self._lock:
            offer = self._offers.get(hello.key)
        line.sendall(ANSWER.pack(offer is not None, 0))
        return offer

    def _give(self, line: ssl.SSLSocket, offer: Offer) -> None:
        while True:
            (number,) = REQUEST.unpack(exactly(line, REQUEST.size))
            data = self._find(offer, number)
            if data is None:
                with self._lock:  # it may have moved, or be offered no more
                    newer = self._offers.get(offer.key)
                if newer is None:
                    return
                data = self._find(newer, number) if newer != offer else None
                offer = newer
            line.sendall(ANSWER.pack(data is not None, len(data or b"")))
            for at in range(0, len(data or b""), PART_BYTES):
                part = memoryview(data or b"")[at : at + PART_BYTES]
                self.pace.take(len(part))
                line.sendall(part)

    def _find(self, offer: Offer, number: int) -> bytes | None:
        try:
            return self._read(offer, number)
        except (OSError, ValueError, IndexError, msgspec.DecodeError):
            return None

    def _read(self, offer: Offer, number: int) -> bytes:
        if number == WANTS_MANIFEST:
            if offer.manifest:
                with open(offer.manifest, "rb") as file:
                    return file.read(store.HEADER_BYTES_MAX)
            return store.read_manifest(offer.folder, offer.owner)
        layout = self._layouts.get(offer)
        if layout is None:
            layout = self._layout(offer)
            with self._lock:
                while len(self._layouts) >= LAYOUTS_MAX:
                    self._layouts.pop(next(iter(self._layouts)))
                self._layouts[offer] = layout
        plain = bool(offer.manifest)
        return store.read(offer.folder, layout, number, offer.owner, plain=plain)

    def _layout(self, offer: Offer) -> Layout:
        if not offer.manifest:
            return store.layout_of(offer.folder, offer.owner)
        with open(offer.manifest, "rb") as file:
            data = file.read(store.HEADER_BYTES_MAX)
        return decode_manifest(data).layout


def exactly(line: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    view, got = memoryview(found), 0
    while got < size:
        part = line.recv_into(view[got:])
        if not part:
            raise ConnectionResetError("it hung up")
        got += part
    return bytes(found)


def listen(port: int) -> socket.socket:
    """On all addresses, because which of them peers use is not known here."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64
            )
    return socket.create_server(("", port), backlog=64)


def certificate() -> tuple[ssl.SSLContext, bytes]:
    """Self-signed, for this life of the door; and the SHA-256 by which it is known."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal blocks")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile(prefix="shoal-") as file:  # mode 600; `ssl` reads files only
        file.write(made.public_bytes(serialization.Encoding.PEM))
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        file.flush()
        context.load_cert_chain(file.name)
    return context, made.fingerprint(hashes.SHA256())


def main() -> int:
    door = Door()
    sys.stdout.buffer.write(msgspec.json.encode(door.at) + b"\n")
    sys.stdout.flush()
    door.start()
    for line in sys.stdin.buffer:
        with contextlib.suppress(msgspec.DecodeError):
            order = msgspec.json.decode(line, type=Offer | Speed)
            if isinstance(order, Speed):
                door.pace.bytes_s = order.bytes_s
            else:
                door.offer(order)
    os._exit(0)  # without waiting for those who fetch


if __name__ == "__main__":
    sys.exit(main())
