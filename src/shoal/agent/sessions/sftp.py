"""An SFTP server on standard input and output, where the system has none."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Any


class _Reader:
    """What asyncssh's server needs of a channel, over a pipe."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self.logger = _Quiet()
        self.channel = self

    async def readexactly(self, count: int) -> bytes:
        return await self._reader.readexactly(count)

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default


class _Quiet:
    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_fields: self

    def isEnabledFor(self, _level: int) -> bool:  # noqa: N802
        return False


class _Writer:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        await self._writer.drain()


class _Channel:
    def get_connection(self) -> Any:
        return self

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default

    @property
    def logger(self) -> Any:
        return _Quiet()


async def main() -> None:
    import asyncssh

    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await loop.connect_read_pipe(lambda: protocol, os.fdopen(0, "rb", buffering=0))
    transport, flow = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(1, "wb", buffering=0)
    )
    writer = asyncio.StreamWriter(transport, flow, None, loop)
    channel: Any = _Channel()
    server = asyncssh.SFTPServer(channel)
    far: tuple[Any, Any] = _Reader(reader), _Writer(writer)
    await asyncssh.sftp.run_sftp_server(server, *far, 3)


if __name__ == "__main__":
    logging.disable()
    asyncio.run(main())
    sys.exit(0)
