"""The best pipeline of equal replicas from pools of devices, by dynamic programming (Sailor 4.2.2). It knows
costs by number only; `planner/devices` asks it for sets of devices worth planning for."""
