"""Text for people and files: units, wording, tables, TOML. Free of torch."""
