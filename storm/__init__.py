"""The storm: seeded histories full of faults, and independent checks of what is true."""
