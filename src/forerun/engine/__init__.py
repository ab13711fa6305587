"""The policy half, in integers and without torch: requests, scheduling, plans, commits, text, statistics, simulation."""
