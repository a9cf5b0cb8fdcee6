"""One module a claim, in the order in which they run."""
