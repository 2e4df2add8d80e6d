"""Where: groups, layouts, the host pool, hardware."""
