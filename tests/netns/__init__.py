"""Hosts out of network namespaces, and what is tested with several of them."""

import pytest

pytest.register_assert_rewrite("harness.hosts")
