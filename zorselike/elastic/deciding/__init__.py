"""What comes next is decided: who runs, by which plan, from which state."""
