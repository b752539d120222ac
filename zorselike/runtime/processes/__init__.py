"""The processes of a job: who and where each is, on which device, in which precision."""
