"""Load test of a running Outrider, with the requests of real clients.

`python -m loadtest` runs it with a time limit; `locustfile` is the entry point for locust. Modules in the order of a
run: `workload` defines the cases, `shapes` the number of users over time, `load_clients` send requests over gRPC and
HTTP, `attempt` measures one request, `report` merges the measurements and
shows the results.
"""
