"""Slurm as an engine: what is asked of it, what it says, and a real one."""
