"""An emulated cluster: real ranks of the real runtime, whose layers sleep and whose links are slow."""
