"""A second simulator, with no code of the package's: a step in which only layers and links take time."""
