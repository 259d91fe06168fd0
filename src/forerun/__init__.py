"""forerun: exact speculative sampling. A large language model writes 2 to 4 times faster, and writes the same."""

from typing import TYPE_CHECKING

from forerun.errors import EngineError, ForerunError, UserError
from forerun.types import Output, Piece, SamplingParams, SpeculationStats, TokenLogprob, TokenTrace

if TYPE_CHECKING:
    from forerun.engine.async_llm import AsyncLLM
    from forerun.engine.llm import LLM, Conversation

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "Conversation",
    "EngineError",
    "ForerunError",
    "Output",
    "Piece",
    "SamplingParams",
    "SpeculationStats",
    "TokenLogprob",
    "TokenTrace",
    "UserError",
]

_LAZY = {"LLM": "llm", "Conversation": "llm", "AsyncLLM": "async_llm"}


def __getattr__(name: str) -> object:
    """Import the engine only when it is asked for: `import forerun` stays instant."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"forerun.engine.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")
