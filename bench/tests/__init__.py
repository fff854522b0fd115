"""Tests of the benchmarks: their readers, rules and sums, on cases checked by hand."""
