"""Engines, held to one contract."""

import pytest

pytest.register_assert_rewrite("tests.engines.contract", "tests.engines.hand")
