"""For other projects: the best stage for a call. `models` has models that attend by a stage.

    import attention_ladder

    o = attention_ladder.attend(q, k, v, causal=True)     # by the best stage for this call, here
    print(attention_ladder.choose(q, k, v, causal=True))  # which one that is, and why no other
    attention_ladder.stage(7).attend(q, k, v)             # by stage 7

The import is free: torch and the stages are imported by the first use of these names, and neither
changes the environment of the process.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_ladder.choosing import Choice, attend, choose, stage

__all__ = ["Choice", "attend", "choose", "stage"]


def __getattr__(name: str) -> Any:
    """One of `__all__`, imported when it is first used. Raises AttributeError for others."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attention_ladder import choosing

    return globals().setdefault(name, getattr(choosing, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
