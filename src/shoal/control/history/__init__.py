"""The past in samples: bounded curves of jobs, nodes and services, in a file of their own."""
