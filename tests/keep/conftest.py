"""Every test here leaves nothing behind."""

from leftovers import nothing_is_left

__all__ = ["nothing_is_left"]
