"""Kubernetes brings nodes: pods in which the agent runs (docs/kubernetes.md)."""
