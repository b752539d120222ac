"""Errors a user can mend: each says what is wrong, where, and what to do."""


class PlanError(ValueError):
    """A plan contradicts itself, the model, or the running world."""


class ConfigError(ValueError):
    """A recipe, a command-line flag or an argument of the public API is wrong."""


class ClusterError(ValueError):
    """A cluster description, or the machines that came up, are wrong."""


class ProfileError(ValueError):
    """A profile is malformed or belongs to something else."""
