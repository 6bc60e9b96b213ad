"""Steps that `--bench` runs, whatever `max_steps` says: the processes run them, the launcher shows them."""

WARM_UP = 3  # the trainer's steps that are not counted: they compile, for the first shape that comes and then for any
TRAINER_STEPS = WARM_UP + 5
ORCHESTRATOR_STEPS = 4
BENCH_STEPS = {"trainer": TRAINER_STEPS, "orchestrator": ORCHESTRATOR_STEPS}
