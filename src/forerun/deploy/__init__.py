"""Several engines as one service on Ray: replicas behind a router, and their number by load."""
