"""What connectors share, whichever engine they serve: nothing here imports an engine."""
