"""The kuhn-poker taskset and environment: a task is a deal, an episode a game; each of two agents gets its chips."""

import contextlib
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf

from kuhn_poker.game import DEALS, RULES, Deal, Outcome, is_over, message, parse, play, to_act
from prime_rl.envs.verifiers_v1 import HARNESS_ID

PLAYERS = ("player_1", "player_2")


class KuhnPokerData(vf.TaskData):
    cards: tuple[str, str]
    first: int

    @property
    def deal(self) -> Deal:
        return Deal(self.cards, self.first)


class KuhnPokerTask(vf.Task[KuhnPokerData]):
    @property
    def key(self) -> str:
        # The default key hashes every field, defaults and row number included.
        return f"kuhn-poker/{self.data.id}"


class KuhnPokerConfig(vf.TasksetConfig):
    split: Literal["train", "eval"] = "train"
    """Without effect: the game has twelve beginnings, none of which could be left out of it."""
    deals: list[str] | None = None
    """Ids of the deals, such as KJ-2; all twelve by default."""


class KuhnPokerTaskset(vf.Taskset[KuhnPokerTask, KuhnPokerConfig]):
    def load(self) -> Iterator[KuhnPokerTask]:
        config = self.config
        known = {deal.id: deal for deal in DEALS}
        for name in known if config.deals is None else config.deals:
            if name not in known:
                raise ValueError(f"deals: there is no {name!r} (there are {', '.join(known)})")
            deal = known[name]
            data = KuhnPokerData(id=name, system_prompt=RULES, cards=deal.cards, first=deal.first)
            yield KuhnPokerTask(data, config.task)


class KuhnPokerEnvConfig(vf.EnvConfig):
    # verifiers' defaults are a shell in a remote sandbox, which a conversation has no use for.
    player_1: vf.AgentConfig = vf.AgentConfig(harness={"id": HARNESS_ID}, runtime={"type": "subprocess"})
    player_2: vf.AgentConfig = vf.AgentConfig(harness={"id": HARNESS_ID}, runtime={"type": "subprocess"})


class KuhnPokerEnv(vf.Env[KuhnPokerEnvConfig]):
    async def run(self, task: KuhnPokerTask, agents: vf.Agents) -> None:
        """Open each player's own conversation at its first turn: one that never had to move has nothing to learn."""
        deal, history = task.data.deal, ""
        async with contextlib.AsyncExitStack() as table:
            chats: dict[int, vf.Interaction] = {}
            while not is_over(history):
                player = deal.player(to_act(history))
                if player not in chats:
                    seat = getattr(agents, PLAYERS[player])
                    chats[player] = await table.enter_async_context(seat.interaction(task))
                reply = await chats[player].turn(message(deal.cards[player], history))
                action = None if reply.terminated else parse(reply.last_reply, history)
                if action is None:
                    break
                history += action

    async def finalize(self, task: KuhnPokerTask, episode: vf.Episode) -> None:
        traces = {trace.agent.name: trace for trace in episode.traces}
        outcome = play(task.data.deal, tuple(_replies(traces.get(name)) for name in PLAYERS))  # type: ignore[arg-type]
        for player, name in enumerate(PLAYERS):
            if name in traces:
                _record(traces[name], outcome, player, acts_first=task.data.first == player)


def _replies(trace: vf.Trace | None) -> list[str]:
    return [] if trace is None else [str(message.content or "") for message in trace.assistant_messages]


def _record(trace: vf.Trace, outcome: Outcome, player: int, acts_first: bool) -> None:
    trace.record_reward("chips", float(outcome.chips[player]))
    trace.record_metric("illegal", float(outcome.illegal == player))
    trace.record_metric("acts_first", float(acts_first))
