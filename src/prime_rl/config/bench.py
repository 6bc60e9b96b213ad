"""How many steps `--bench` makes: for those who make them, and for the launcher, which shows them."""

WARM_UP = 3  # the trainer's steps that are not counted: they compile, for the first shape that comes and then for any
TRAINER_STEPS = WARM_UP + 5
ORCHESTRATOR_STEPS = 4


def trainer_steps(max_steps: int | None) -> int:
    """Steps of a trainer, SFT's too, that would else make `max_steps`."""
    return min(max_steps or TRAINER_STEPS, TRAINER_STEPS)
