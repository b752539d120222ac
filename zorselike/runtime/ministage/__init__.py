"""One ministage on one rank: sharded by FSDP2, reduced once, with an optimizer of its own (Zorse 4.1.2 and
4.1.3)."""
