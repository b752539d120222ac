"""Plans: who computes what. Plain data, free of torch."""

from zorselike.plan.devices import Process, match_devices
from zorselike.plan.errors import ClusterError, ConfigError, PlanError, ProfileError
from zorselike.plan.plan import Device, Estimates, Group, Microbatch, Ministage, Plan
from zorselike.plan.shares import expand_shares
from zorselike.plan.validate import validate_modules

__all__ = [
    "ClusterError",
    "ConfigError",
    "Device",
    "Estimates",
    "Group",
    "Microbatch",
    "Ministage",
    "Plan",
    "PlanError",
    "Process",
    "ProfileError",
    "expand_shares",
    "match_devices",
    "validate_modules",
]
