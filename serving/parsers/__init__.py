"""Reasoning and tool calls in the text of a model: streaming and not, the same code.

make_parser gives an OutputParser for one output sequence; push text, finish, join the deltas with
Message. Pure Python; must never import the engine. Used by the HTTP faces.
"""

from serving.parsers.messages import Message, MessageDelta, ToolCall, ToolCallDelta
from serving.parsers.output import OutputParser
from serving.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, check_parsers, make_parser

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Message",
    "MessageDelta",
    "OutputParser",
    "ToolCall",
    "ToolCallDelta",
    "check_parsers",
    "make_parser",
]
