"""All of the library; the names to use are in the modules above this folder."""
