"""Step time and memory of a candidate plan in a fraction of a simulation's time (the recurrence that Zorse's
Eq. 1, section 4.3.4, closes over)."""
