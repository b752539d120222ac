"""From an order of computations to every rank's actions, pass by pass: collectives, transfers, host copies
(DESIGN section 6; Zorse 4.1, 4.2 and 5.4)."""
