"""Cards that become slower while they train: told from noise, and planned for as they are."""
