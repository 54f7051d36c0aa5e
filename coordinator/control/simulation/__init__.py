"""Simulation of sessions in virtual time: the real controller and guess trees, simulated drafters and a verifier."""
