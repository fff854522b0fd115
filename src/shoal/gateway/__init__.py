"""The load balancer: HAProxy rendered, driven through its runtime socket, and read back."""
