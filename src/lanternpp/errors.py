"""The one exception a user's mistake raises."""


class InputError(ValueError):
    """A wrong prompt, option, file or checkpoint.

    The message is one sentence that names the value and what would be right. The command line
    prints it on one line and exits with status 2; a server answers with a 4xx.
    """
