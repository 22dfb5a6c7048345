"""MiniMax M2.

<minimax:tool_call>
<invoke name="NAME">
<parameter name="KEY">VALUE</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from common.parsing.formats.invocations import InvocationFormat


class MiniMax(InvocationFormat):
    names = ("minimax_m2", "minimax_m2_1", "minimax_m2_5")
    starts = ("<minimax:tool_call>", "<invoke ")
    trigger = starts[0]
