"""The job's settings: dataclasses, TOML recipes with TorchTitan's keys, the command line."""
