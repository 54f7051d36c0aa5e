"""Clients that agents are written with, against real processes (`make clients`)."""
