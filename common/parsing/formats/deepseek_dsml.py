"""DeepSeek V4; V3.2 with another name of the outer tags.

<｜DSML｜tool_calls>
<｜DSML｜invoke name="NAME">
<｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>
"""

from __future__ import annotations

from common.parsing.formats.invocations import InvocationFormat


class DeepSeekDsml(InvocationFormat):
    names = ("deepseek_v4", "dsv4")
    starts = ("<｜DSML｜tool_calls>", "<｜DSML｜function_calls>", "<｜DSML｜invoke ")
    trigger = starts[0]
    prefix = "｜DSML｜"
    typed = True
