"""Tests of what Python programs use."""
