"""Which nodes and jobs are slow, hung or failing, and what follows: pure, from beats and checks."""
