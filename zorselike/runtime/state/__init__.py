"""The state of a whole pipeline: read, saved, loaded and moved, whatever the plan."""
