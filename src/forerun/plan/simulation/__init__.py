"""Engines in virtual time: arrivals and traces, replicas behind a router, and what their requests would have seen."""
