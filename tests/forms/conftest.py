"""The `shoal` of these tests is that of the command line's."""

from tests.cli.conftest import shoal

__all__ = ["shoal"]
