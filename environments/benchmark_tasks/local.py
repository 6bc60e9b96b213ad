"""How a model gets a problem: one conversation, in this process. verifiers' default is a shell in a remote sandbox."""

import verifiers.v1 as vf

from prime_rl.envs.verifiers_v1 import HARNESS_ID


class LocalEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": HARNESS_ID}, runtime={"type": "subprocess"})


class LocalEnv(vf.Env[LocalEnvConfig]):
    """One agent, which answers; the same for every benchmark."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task)
