"""The parts of `shoal up`: what this machine has, the nodes made of it, Ray, and hosts over ssh."""
