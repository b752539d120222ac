"""Which devices to use at all, within quotas and limits of money (Sailor 4.2)."""
