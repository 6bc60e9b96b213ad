"""Settings of the orchestrator: algorithms, filters, evaluation."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from prime_rl.config.base import Checks, Problem, Section, conflict, option
from prime_rl.config.shared import (
    Address,
    ClientConfig,
    EnvConfig,
    Environments,
    Examples,
    Fraction,
    ModelConfig,
    MonitorConfig,
    RecoverableRun,
    SamplingConfig,
    SamplingOverride,
)
from prime_rl.config.trainer import (
    AdamW,
    ConstantScheduler,
    DefaultLoss,
    LossConfig,
    OptimConfig,
    PolicyLoss,
    SchedulerConfig,
    check_schedule,
)


class LinearPenalty(Section):
    """The reward loses a share of the group's mean reward that grows with length, relative to the group's longest."""

    type: Literal["linear"] = option("linear", "Kind of length penalty.")
    output: NonNegativeFloat = option(0.25, "Weight of the sampled tokens.")
    input: NonNegativeFloat = option(0.1, "Weight of all other tokens.")
    turns: NonNegativeFloat = option(0.1, "Weight of the turns.")


class OverlongPenalty(Section):
    """DAPO's soft overlong punishment: the reward falls near the end of the room for a reply, by `scale` beyond it."""

    type: Literal["overlong"] = option("overlong", "Kind of length penalty.")
    max_tokens: PositiveInt = Field(description="Sampled tokens from which on the whole penalty is taken off.")
    cache: PositiveInt = Field(description="Tokens before that over which it grows.")
    scale: PositiveFloat = option(1.0, "The whole penalty.")

    def checks(self) -> Checks:
        message = f"<cache> {self.cache} is more than <max_tokens> {self.max_tokens}"
        yield conflict(self.cache > self.max_tokens, message)


class TeacherServer(Section):
    """Another model's server, which samples."""

    base_url: Address = Field(description="Address of the server, with or without /v1.")
    model: str = option("", "Name of the model there (empty: the first one it lists).")
    api_key_var: str = option("TEACHER_API_KEY", "Environment variable that holds the API key.")
    max_concurrent: PositiveInt = option(32, "Most episodes, of a model that scores requests, at a time.")


class TeacherConfig(TeacherServer):
    """Another model's server that gives the log-probabilities of a prompt, as vLLM does (`prompt_logprobs`)."""

    timeout: PositiveFloat = option(120.0, "Seconds that one request may take.")


Component = Literal["rl", "ce", "ref_kl"]


class Algorithm(Section):
    """What all algorithms are asked."""

    component: ClassVar[Component] = "rl"  # of the loss, which sampled tokens feed; only `rl` knows advantages

    @property
    def group_relative(self) -> bool:
        """Whether it compares attempts at one task, so that several are needed and equal rewards tell nothing."""
        return isinstance(self, GroupRelative) or (isinstance(self, ReinforcePP) and self.group_baseline)


class ByReward(Algorithm):
    """Algorithms that weigh tokens by an advantage."""

    length_penalty: LinearPenalty | OverlongPenalty | None = option(
        None, "Taken off the reward before advantages are computed.", discriminator="type"
    )


class GroupRelative(ByReward):
    """Algorithms that compare attempts at one task."""


class GRPO(GroupRelative):
    """Advantage: the reward minus the mean of its group."""

    type: Literal["grpo"] = option("grpo", "Kind of algorithm.")
    std_normalize: bool = option(False, "Divide by the standard deviation of the group.")


class RLOO(GroupRelative):
    """Advantage: the reward minus the mean of the other rewards of its group."""

    type: Literal["rloo"] = option("rloo", "Kind of algorithm.")


class OPO(GroupRelative):
    """Advantage: the reward minus the mean of its group weighted by length, the baseline of least variance."""

    type: Literal["opo"] = option("opo", "Kind of algorithm.")


class MaxRL(GroupRelative):
    """Advantage: the reward minus the mean of its group, divided by that mean: rare successes weigh more."""

    type: Literal["max_rl"] = option("max_rl", "Kind of algorithm.")


class ReinforcePP(ByReward):
    """REINFORCE++. Advantage: the reward, normalized over the environment's episodes in the batch."""

    type: Literal["reinforce_pp"] = option("reinforce_pp", "Kind of algorithm.")
    group_baseline: bool = option(False, "Take the mean of the group off first (REINFORCE++-baseline).")


class RAE(ByReward):
    """Role-conditioned advantage estimation: the reward minus a moving average of the agent's earlier rewards."""

    type: Literal["rae"] = option("rae", "Kind of algorithm.")
    decay: Fraction = option(0.95, "Share of the old average that stays with each reward.")


class GDPO(GroupRelative):
    """Every reward function is normalized within its group by itself; the weighted sum is normalized over the batch."""

    type: Literal["gdpo"] = option("gdpo", "Kind of algorithm.")
    weights: dict[str, float] = option(dict, "Weight of each reward function (empty: all that are there, equally).")

    def checks(self) -> Checks:
        zero = self.weights and not any(self.weights.values())
        unread = "<length_penalty> has no effect: gdpo reads the rewards of single functions"
        yield conflict(zero, "<weights> are all zero, and so would be every advantage")
        yield conflict(self.length_penalty is not None, unread)


class CustomAlgorithm(ByReward):
    """Advantages of your own."""

    type: Literal["custom"] = option("custom", "Kind of algorithm.")
    path: str = Field(description="Function: module:name or file.py:name.")
    args: dict[str, Any] = option(dict, "Its keyword arguments.")


class Distillation(Algorithm):
    """Algorithms that learn from a teacher, whatever the reward is."""

    teacher: TeacherServer | None = option(None, "The model to learn from.")

    def checks(self) -> Checks:
        name = type(self).__name__.lower()
        yield conflict(self.teacher is None, f"{name} needs a <teacher>: give teacher.base_url")


class OPD(Distillation):
    """On-policy distillation: the teacher scores what the policy samples, which moves towards it (reverse KL)."""

    component: ClassVar[Component] = "ref_kl"

    type: Literal["opd"] = option("opd", "Kind of algorithm.")
    teacher: TeacherConfig | None = option(None, "The model to learn from.")


class SFT(Distillation):
    """Distillation off policy: the teacher samples, the policy learns its tokens by cross-entropy."""

    component: ClassVar[Component] = "ce"

    type: Literal["sft"] = option("sft", "Kind of algorithm.")


class OPSD(Algorithm):
    """On-policy self-distillation: the policy, shown a demonstration, scores what it sampled without one."""

    component: ClassVar[Component] = "ref_kl"

    type: Literal["opsd"] = option("opsd", "Kind of algorithm.")
    demonstration: str = option("answer", "Field of a task that demonstrates it.", min_length=1)
    template: str = option(
        "A correct answer to what follows is:\n{demonstration}\nAnswer in your own words.",
        "System message that shows it, {demonstration} in it.",
    )

    def checks(self) -> Checks:
        yield conflict("{demonstration}" not in self.template, "<template> has no {demonstration} in it")


class Echo(GroupRelative):
    """GRPO, and cross-entropy on what the environment says after the policy's first reply: it learns to foresee it."""

    type: Literal["echo"] = option("echo", "Kind of algorithm.")
    std_normalize: bool = option(False, "Divide by the standard deviation of the group.")
    weights: dict[str, float] = option(lambda: {"tool": 0.1}, "Weight of tokens by the role of their message.")

    def checks(self) -> Checks:
        known = ("system", "user", "assistant", "tool")
        if unknown := sorted(self.weights.keys() - set(known)):
            yield Problem(f"<weights>: no message has the role {unknown[0]!r} (roles: {', '.join(known)})")
        if negative := [role for role, weight in self.weights.items() if weight < 0]:
            yield Problem(f"<weights>: {negative[0]} is below zero")


RewardAlgorithm = GRPO | Echo | RLOO | OPO | MaxRL | ReinforcePP | RAE | GDPO | CustomAlgorithm
AlgorithmConfig = RewardAlgorithm | OPD | OPSD | SFT


class TruncatedFilter(Section):
    """Leaves out episodes that were cut off."""


class RepetitionFilter(Section):
    """Leaves out episodes that repeat themselves."""

    ngram: PositiveInt = option(16, "Tokens of what is looked for again.")
    max_share: Fraction = option(0.5, "Largest share of such sequences that occurred before in the same reply.")
    min_tokens: PositiveInt = option(64, "Shorter replies are not looked at.")


class GibberishFilter(Section):
    """Leaves out episodes with rare tokens that the sampler itself found most improbable."""

    min_token_id: NonNegativeInt = option(100_000, "Ids from here on are rare, as tokenizers number them.")
    max_logprob: float = option(-14.0, "Log-probability below which a token is improbable.", lt=0)


class DifficultyFilter(Section):
    """Turns groups away that are too hard or too easy; others take their place."""

    low: float = option(0.0, "Groups are kept whose mean reward is above.")
    high: float = option(1.0, "And below.")

    def checks(self) -> Checks:
        message = f"<low> {self.low} is not below <high> {self.high}: every group would be rejected"
        yield conflict(self.low >= self.high, message)


class CustomFilter(Section):
    """A filter of your own."""

    path: str = Field(description="Function: module:name or file.py:name.")
    args: dict[str, Any] = option(dict, "Its keyword arguments.")


class FilterConfig(Section):
    """What is left out of training, whatever its reward."""

    dynamic_sampling: bool = option(False, "Turn groups away whose advantages are all zero; others take their place.")
    difficulty: DifficultyFilter | None = option(None, "By the mean reward of a group.")
    truncated: TruncatedFilter | None = option(None, "Episodes that were cut off.")
    repetition: RepetitionFilter | None = option(None, "Episodes that repeat themselves.")
    gibberish: GibberishFilter | None = option(None, "Episodes with improbable rare tokens.")
    custom: CustomFilter | None = option(None, "A filter of your own.")


class CurriculumConfig(Section):
    """Difficulty pools: tasks are drawn more or less often by the mean reward of their last group."""

    easy: float = option(0.8, "Mean reward from which on a task is easy.")
    hard: float = option(0.2, "Mean reward up to which a task is hard.")
    easy_weight: PositiveFloat = option(0.1, "How often an easy task is drawn, next to a new one.")
    hard_weight: PositiveFloat = option(0.5, "How often a hard one is.")

    def checks(self) -> Checks:
        message = f"<hard> {self.hard} is not below <easy> {self.easy}: a task would be both"
        yield conflict(self.hard >= self.easy, message)


class TrainingEnv(EnvConfig):
    """An environment that is trained on."""

    algorithm: AlgorithmConfig | None = option(None, "Algorithm of it alone (None: that of all).", discriminator="type")
    filters: FilterConfig | None = option(None, "Filters of this environment alone.")
    curriculum: CurriculumConfig | None = option(None, "Difficulty pools of this environment alone.")


class TenantConfig(Section):
    """Join a deployment: its trainer trains an adapter for this orchestrator beside those of others."""

    join: Path = Field(description="Run directory of the trainer that is shared; this run is below it.")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$", description="Name of the tenant there.")
    optim: OptimConfig = option(AdamW, "The optimizer.", discriminator="type")
    scheduler: SchedulerConfig = option(ConstantScheduler, "Schedule of the learning rate.", discriminator="type")
    loss: LossConfig = option(DefaultLoss, "The loss of a token.", discriminator="type")

    @property
    def directory(self) -> Path:
        """The tenant's run directory."""
        return self.join / "tenants" / self.name


class EvalSection(Environments[EnvConfig]):
    """Evaluation during the run; by default of the training environments, with their argument `split` = "eval"."""

    num_examples: Examples = option(-1, "Tasks per environment (-1: all).")
    rollouts_per_example: PositiveInt = option(1, "Attempts at one task.")
    interval: PositiveInt | None = option(None, "Steps between two evaluations (None: none in between).")
    at_start: bool = option(True, "Evaluate the base model first.")
    at_end: bool = option(True, "Evaluate the final weights.")
    sampling: SamplingOverride = option(SamplingOverride, "Sampling settings that differ from those of training.")


class OrchestratorConfig(RecoverableRun, Environments[TrainingEnv]):
    """The orchestrator: makes rollouts, scores them, cuts batches."""

    model: ModelConfig = option(ModelConfig, "The model.")
    client: ClientConfig = option(ClientConfig, "The inference server to talk to.")
    sampling: SamplingConfig = option(SamplingConfig, "How tokens are sampled.")
    batch_size: PositiveInt = option(128, "Rollouts per step.")
    rollouts_per_example: PositiveInt = option(16, "Attempts at one task; divides batch_size.")
    seq_len: PositiveInt = option(2048, "Most tokens of one sample.")
    max_off_policy_steps: NonNegativeInt = option(8, "Most steps from a sample's oldest token to training on it.")
    max_concurrent: PositiveInt | None = option(None, "Most episodes in flight (None: batch_size x (async_level + 1)).")
    renderer: str = option("auto", "Renderer of chats: auto, default, chatml, or a name that renderers has.")
    algorithm: AlgorithmConfig = option(GRPO, "What an episode is worth, compared with others.", discriminator="type")
    reference: TeacherConfig | None = option(None, "A reference model to score samples, for trainer.loss.kl_coef.")
    filter_zero_advantage: bool = option(True, "Leave out samples whose advantage is exactly zero.")
    filters: FilterConfig = option(FilterConfig, "What else is left out of training.")
    curriculum: CurriculumConfig | None = option(None, "Draw tasks by difficulty (None: epoch after epoch).")
    max_error_rate: Fraction = option(0.5, "Share of failed episodes beyond which the run stops.")
    rollout_timeout: PositiveFloat = option(300.0, "Seconds that one episode may take.")
    weights_timeout: PositiveFloat = option(3600.0, "Seconds to wait for a version of the weights.")
    trainer: bool = option(True, "A trainer takes part (false: all batches are the base model's; ignored by `rl`).")
    logprob_check: bool = option(True, "Check after every load that a server computes what the trainer computed.")
    eval: EvalSection | None = option(None, "Evaluation during the run.")
    monitor: MonitorConfig = option(MonitorConfig, "Where metrics go, beside metrics/*.jsonl.")
    tenant: TenantConfig | None = option(None, "Share the trainer of another run directory (None: one of this run).")

    @property
    def most_in_flight(self) -> int:
        return self.max_concurrent or self.batch_size * (self.async_level + 1)

    def checks(self) -> Checks:
        longest, groups = self.sampling.max_tokens or 0, self.rollouts_per_example
        sizes = f"<rollouts_per_example> {groups} does not divide <batch_size> {self.batch_size}"
        ages = f"<max_off_policy_steps> {self.max_off_policy_steps} is below <async_level> {self.async_level}"
        room = f"<sampling.max_tokens> {longest} leaves no room for a prompt within <seq_len> {self.seq_len}"
        greedy = "temperature 0 samples greedily: there is no distribution to train on (evaluations may use it)"
        yield conflict(not self.environments, "no environment: give [environment] with an `id`", "environment")
        yield conflict(self.batch_size % groups, sizes)
        for algorithm, key in self.in_use("algorithm"):
            normalized, alone = algorithm.type == "reinforce_pp", "every advantage would be zero"
            batch = f"reinforce_pp compares the episodes of a batch: with <batch_size> 1 {alone}"
            group = f"{algorithm.type} compares attempts at one task: with <rollouts_per_example> 1 {alone}"
            yield conflict(normalized and self.batch_size == 1, batch, f"{key}.type")
            yield conflict(groups == 1 and algorithm.group_relative, group, f"{key}.type")
        yield conflict(self.max_off_policy_steps < self.async_level, ages)
        yield conflict(longest >= self.seq_len, room)
        yield conflict(self.sampling.temperature == 0, greedy, "sampling.temperature")
        for env in self.environments:
            component, sampling = self.algorithm_of(env.name).component, self.sampling.changed(env.sampling)
            key = f"environments.{env.name}.sampling" if env.sampling else "sampling"
            who = "a teacher" if component == "ref_kl" else "the reference"
            scored = component == "ref_kl" or (component == "rl" and self.reference is not None)
            at = f"{who} tells log-probabilities of temperature 1, and {env.name} is sampled at {sampling.temperature}"
            yield conflict(sampling.temperature == 0, greedy, f"{key}.temperature")
            yield conflict(scored and sampling.temperature != 1.0, at, f"{key}.temperature")

        if self.tenant is not None:
            yield from self._tenant_checks(self.tenant)

    def _tenant_checks(self, tenant: TenantConfig) -> Checks:
        """Go on in the tenant's directory from what is committed there, and yield what contradicts that."""
        directory, ckpt = tenant.directory, self.ckpt
        elsewhere = "output_dir" in self.model_fields_set and self.output_dir != directory
        where = f"<output_dir> is {self.output_dir}, but the run of this tenant is in {directory}: leave it out"
        step = "a tenant goes on from what is committed: leave <ckpt.resume_step> out"
        yield conflict(elsewhere, where, "tenant.join")
        yield conflict(not self.trainer, "a tenant has a trainer: leave <trainer> = false out")
        yield conflict(self.bench, "a tenant is not measured alone: leave <bench> out")
        yield conflict(self.router_replay, "tenants are trained without <router_replay>: leave it out")
        yield conflict(ckpt and ckpt.output_dir, f"a tenant saves in {directory}: leave <ckpt.output_dir> out")
        yield conflict(ckpt and ckpt.resume_step is not None, step)
        self.output_dir, self.recover = directory, not self.clean
        yield check_schedule(tenant.scheduler, self.max_steps, "tenant.scheduler")
        yield from self.check_loss(tenant.loss, "tenant.loss")

    def check_loss(self, loss: PolicyLoss, at: str, own: str = "", bench: bool = False) -> Checks:
        """Yield what contradicts between the loss, whose path is `at`, and the orchestrator, whose path is `own`."""
        key = f"<{at}.{'kl_coef' if loss.kl_coef else 'entropy_coef'}>"
        penalized, reference = loss.kl_coef or loss.entropy_coef, self.reference is not None
        if penalized and all(algorithm.component != "rl" for algorithm, _ in self.in_use("algorithm")):
            yield Problem(f"{key} has no effect: nothing is trained by reward", f"{own}algorithm.type")
        else:
            unread = f"a reference model has no effect where the loss does not ask for it: give <{at}.kl_coef>"
            yield conflict(reference and not loss.kl_coef, unread, f"{own}reference")
            needed = f"the divergence from a reference model needs one: give <{own}reference>.base_url"
            yield conflict(loss.kl_coef and not reference and not bench, needed, f"{at}.kl_coef")
        # They are meant for all that the policy samples. What a batch leaves out is for the orchestrator alone to say.
        unseen = f"{key} would not reach samples of advantage zero: set <{own}filter_zero_advantage> = false"
        yield conflict(penalized and self.filter_zero_advantage, unseen)

    def all_environments(self) -> list[EnvConfig]:
        """Those that are trained on, and those of evaluations."""
        return [*self.environments, *(self.eval.environments if self.eval else [])]

    def algorithm_of(self, env: str) -> AlgorithmConfig:
        return self._named(env).algorithm or self.algorithm

    def filters_of(self, env: str) -> FilterConfig:
        return self._named(env).filters or self.filters

    def curriculum_of(self, env: str) -> CurriculumConfig | None:
        return self._named(env).curriculum or self.curriculum

    def _named(self, name: str) -> TrainingEnv:
        return next(env for env in self.environments if env.name == name)

    def in_use(self, name: Literal["algorithm", "filters"]) -> list[tuple[Any, str]]:
        """The values of a setting that environments may have of their own, each with its key."""
        values = [(getattr(env, name), f"environments.{env.name}.{name}") for env in self.environments]
        own = [(value, key) for value, key in values if value]
        return [*([(getattr(self, name), name)] if len(own) < len(self.environments) else []), *own]
