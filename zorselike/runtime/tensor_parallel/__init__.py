"""Layers cut over the ranks of a replica, of any degrees inside one group (Sailor 4.4): which weights are
cut, their pieces, and who has which positions of the sequence."""
