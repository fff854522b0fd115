"""Hosts out of network namespaces, and what is tested with several of them."""
