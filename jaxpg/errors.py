"""The one exception for what a person, not the program, has to mend."""


class UserError(ValueError):
    """A mistake at the boundary: the message says what was given, what was expected and what to do.

    The command line prints the message alone and exits with code 2; a caller of the library catches a ValueError.
    """
