"""Thin probes: what a node's CPUs, memory, disk, clock and GPUs do right now."""
