"""`[elastic]`: training goes on in the same processes when some of them die, leave or come (Sailor 4.4).
What depends on who is there is made anew for each generation."""
