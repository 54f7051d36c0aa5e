"""Hidden states on their way from the target to a drafter: how numbers are sent, and projections of several layers."""
