"""Groups of the kernel (cgroups, version 1 or 2) that hold members to what they may use."""
