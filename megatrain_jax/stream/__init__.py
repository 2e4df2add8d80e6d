"""When state moves: the schedule as plain data, and the engine that obeys it."""
