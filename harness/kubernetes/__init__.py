"""A Kubernetes of the tests: an API server, a scheduler and a kubelet without containers."""
