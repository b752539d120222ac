"""A job over hours in which devices come and go, replayed in virtual time by several rules."""
