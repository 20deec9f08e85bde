"""PRIME (arXiv 2502.01456) for rlrun: process rewards learned online from outcomes alone."""
