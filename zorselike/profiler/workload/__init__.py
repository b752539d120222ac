"""The workload of any model, measured on fake tensors: parameters, FLOPs and bytes of its layers."""
