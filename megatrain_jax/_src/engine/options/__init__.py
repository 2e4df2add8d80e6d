"""The options of a run, and checks of everything that a user passes."""
