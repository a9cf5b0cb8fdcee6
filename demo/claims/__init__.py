"""One module per claim, in the order in which they run."""
