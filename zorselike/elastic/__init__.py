"""A job whose ranks die, come and go while it runs on in the same processes (Sailor 4.4, kill-free
reconfiguration)."""
