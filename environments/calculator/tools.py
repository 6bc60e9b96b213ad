"""The tool server. verifiers starts it as a process of its own: `python -m calculator.tools`."""

import verifiers.v1 as vf

from calculator.arithmetic import ArithmeticRefused
from calculator.arithmetic import calculate as exactly

REFUSED = "Refused: "


class CalculatorTools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None  # `calculate`, not `calculator_tools_calculate`

    @vf.tool
    def calculate(self, expression: str) -> str:
        """Calculate, e.g. 2*(3+4)"""
        try:
            return exactly(expression)
        except ArithmeticRefused as error:
            return f"{REFUSED}{error}"


if __name__ == "__main__":
    CalculatorTools.run()
