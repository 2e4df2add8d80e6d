"""The tools of every room: checks of arguments, differences of trees, names in files."""
