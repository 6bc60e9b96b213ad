"""`rl view`: a local web page of runs, running or finished, from their files alone. Nothing here writes to a run."""
