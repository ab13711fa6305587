"""Replicas behind one address on Ray Serve, and offline batches on Ray Data."""
