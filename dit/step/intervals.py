"""Intervals in optimizer steps."""


def is_due(step: int, interval: int) -> bool:
    """Return whether an action with this interval follows `step`; an interval of 0 means never."""
    return interval > 0 and step % interval == 0
