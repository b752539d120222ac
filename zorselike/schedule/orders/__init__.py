"""Orders of computation that a plan may run in, before anything else is put around them (Zorse 4.1;
1F1B and interleaved 1F1B as pipelines use them today)."""
