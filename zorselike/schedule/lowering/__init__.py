"""From an order of computations to every rank's actions, pass by pass: collectives, transfers, host copies
(Zorse 4.1, 4.2 and 5.4)."""
