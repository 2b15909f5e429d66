"""What comes from a person or a file: which numbers a setting may be, functions by name, text that is safe to show."""

from jaxpg.user_input import domains, printable, user_code

__all__ = ["domains", "printable", "user_code"]
