"""`zorselike launch` and `zorselike plan --launch`: what starts a plan on the nodes that it
names, one component a kind of node."""
