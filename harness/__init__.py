"""What tests and benchmarks drive Shoal with: hosts made of network namespaces, a browser, gangs of
made-up members, a Slurm. It imports neither of them, and they do not import each other."""
