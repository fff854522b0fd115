"""Tests of the engine for many machines."""
