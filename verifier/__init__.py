"""The truth: holds the target model, checks guesses, commits tokens."""

from outrider.base.openmp import wait_briefly

wait_briefly()  # here, since every other module of the service loads torch
