"""verifiers packages with tools: a server per worker, and one per episode."""

TOOLS = """
import os, time
import verifiers.v1 as vf

class Count(vf.State):
    total: int = 0

class Desk(vf.Toolset[vf.SharedToolsetConfig, Count]):
    @vf.tool
    def add(self, a: int, b: int = 1) -> int:
        \"\"\"The sum of two numbers.\"\"\"
        self.state.total += 1
        return a + b

    @vf.tool
    def divide(self, a: int, b: int) -> float:
        \"\"\"A quotient.\"\"\"
        return a / b

    @vf.tool
    def stall(self) -> str:
        \"\"\"Blocks the server.\"\"\"
        time.sleep(600)

    @vf.tool
    def quit(self) -> str:
        \"\"\"The end of the server.\"\"\"
        print("quitting", flush=True)
        os._exit(1)

class Pad(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    async def setup_task(self, task) -> None:
        self.text = task.prompt

    @vf.tool
    def word(self) -> str:
        \"\"\"The task.\"\"\"
        return self.text

if __name__ == "__main__":
    (Pad if os.environ.get("VF_STATE_URL") else Desk).run()
"""

SHARED = """
import verifiers.v1 as vf
from desk_tools import Count, Desk

class Data(vf.TaskData):
    pass

class Task(vf.Task[Data, Count]):
    @vf.reward(weight=1.0)
    async def added(self, trace: vf.Trace) -> float:
        return float(trace.state.total)

class DeskTaskset(vf.Taskset[Task, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Desk(vf.SharedToolsetConfig())]

    def load(self):
        yield Task(Data(prompt="What is 2 + 3?"), self.config.task)

__all__ = ["DeskTaskset"]
"""

OWN = """
import verifiers.v1 as vf
from desk_tools import Pad

class Data(vf.TaskData):
    pass

class Task(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Pad(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def marks(self, trace: vf.Trace) -> float:
        return 1.0

class PadTaskset(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(Data(prompt="hello", system_prompt="s"), self.config.task)

__all__ = ["PadTaskset"]
"""

DATA = "class Data(vf.TaskData)"
BROKEN = SHARED.replace(DATA, f'class Desk(Desk):\n    pass\n\nDesk.__module__ = "no_such_module"\n\n{DATA}')
SETUP = "    async def setup_task(self, task) -> None:\n        raise RuntimeError('the index is not there')"
BAD_PAD = OWN.replace(DATA, f"class Pad(Pad):\n{SETUP}\n\n{DATA}") + 'if __name__ == "__main__":\n    Pad.run()\n'

SOURCES = {"env_bad_pad": BAD_PAD, "env_no_desk": BROKEN, "desk_tools": TOOLS, "env_desk": SHARED, "env_pad": OWN}
