"""What every room may use: checks of arguments, differences of trees, names in files."""
