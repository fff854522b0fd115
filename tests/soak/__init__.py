"""`make soak`: a cluster that is hurt in every way, and has to keep its word."""
