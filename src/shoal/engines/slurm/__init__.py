"""Slurm brings the nodes: Shoal's agents run inside ordinary jobs of its queue (docs/slurm.md)."""
