"""What every test of the house needs before the first of them is imported."""

import pytest

pytest.register_assert_rewrite("harness.hosts")
