"""Device and host memory of one rank: offload of parameters, optimizer state and activations on streams
of their own (Zorse 4.1.3 and 5.4)."""
