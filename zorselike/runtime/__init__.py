"""Runs a plan on real devices: partition, ministages on FSDP2, transport, executor."""
