"""Tests of the samples that are kept."""
