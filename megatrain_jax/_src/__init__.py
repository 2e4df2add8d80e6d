"""The library's code; public names are in the modules above this folder."""
