"""The places of state: groups, layouts, the host pool, hardware."""
