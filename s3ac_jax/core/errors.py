"""What ends a run on purpose: one line for the person, one exit code for the shell."""

from typing import ClassVar


class RunError(Exception):
    """A run ends here and it is no bug; the message is one line that says what to do.

    exit_code: of the process. prefix: what stands before the line on stderr.
    Source: ours: rooms raise their own kind, the launch apps know only this one.
    """

    exit_code: ClassVar[int] = 1
    prefix: ClassVar[str] = "error: "
