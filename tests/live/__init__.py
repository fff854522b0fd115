"""Tests of the whole thing with real processes."""
