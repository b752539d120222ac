"""From an order of computations to every rank's actions: transfers, gathers, reductions, host copies and
updates, one pass each (Zorse 4.1 and 4.2)."""
