"""Load on Outrider as its clients make it.

`python -m loadtest` runs it bounded, `locustfile` is what locust runs. In the
order in which a run needs them: `workload` says what is asked, `shapes` how
many ask when, `asking` how over gRPC and HTTP, `attempt` what becomes of a
request, `record` adds requests up, `summary` makes figures of them, `page`
shows them.
"""
