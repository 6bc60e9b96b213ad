"""`rl view`: a local web page of runs, dead or alive, from their files alone. Nothing here writes to a run."""
