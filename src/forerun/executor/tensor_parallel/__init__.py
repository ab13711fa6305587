"""A target whose layers and head several processes of this machine compute together."""
