"""Guesses: runs ahead of the committed position, rolls back on commits."""

from outrider.base.openmp import wait_briefly

wait_briefly()  # here, since every other module of the service loads torch
