"""A step as tasks: every rank's actions on the streams of its device, and what ranks do together."""
