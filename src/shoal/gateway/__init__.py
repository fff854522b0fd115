"""The load balancer: configures HAProxy, drives it through its runtime socket, reads its
figures."""
