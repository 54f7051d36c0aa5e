"""Load on Outrider as its clients make it.

`python -m loadtest` runs it bounded, `locustfile` is what locust runs,
`workload` says what is asked and what the answer must be, `link` is a bad
network on one machine.
"""
