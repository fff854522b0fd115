"""Templates and scripts for machines that other systems bring."""
