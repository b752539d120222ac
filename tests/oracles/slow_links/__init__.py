"""Links that are slept in the transport, by rules of their own, against which the cost model's are held."""
