"""Jobs whose members come and go: started, joined, looked at, left."""
