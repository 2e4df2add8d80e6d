"""Where state lives: layouts, the pinned-host pool, the store, the plan."""
