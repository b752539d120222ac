"""Plans: who computes what. Plain data, free of torch."""

from zorselike.errors import ClusterError, ConfigError, PlanError, ProfileError
from zorselike.plan.cluster.cluster import Cluster, Link, Node, Place
from zorselike.plan.devices import Process, match_devices
from zorselike.plan.plan import Device, Estimates, Group, Microbatch, Ministage, Plan
from zorselike.plan.shares import expand_shares
from zorselike.plan.validate import validate_degrees, validate_modules
from zorselike.plan.workload import LayerKind, Workload

__all__ = [
    "Cluster",
    "ClusterError",
    "ConfigError",
    "Device",
    "Estimates",
    "Group",
    "LayerKind",
    "Link",
    "Microbatch",
    "Ministage",
    "Node",
    "Place",
    "Plan",
    "PlanError",
    "Process",
    "ProfileError",
    "Workload",
    "expand_shares",
    "match_devices",
    "validate_degrees",
    "validate_modules",
]
