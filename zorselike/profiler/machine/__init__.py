"""Links, collectives, copies and memory of the machines at hand, and what would break a long job there."""
