"""The token that servers ask for and clients send, from a file."""

from pathlib import Path

_MOST_CHARS = 4096


def read_token(path: str, name: str) -> str:
    """The token in a file. name: of the flag or field that names the file, for the message.

    Raises ValueError, in one line, when the file can't be read or holds anything else.
    Source: ours.
    """
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: {path} can't be read ({error})") from error
    if not 0 < len(token) <= _MOST_CHARS or not token.isascii() or len(token.split()) > 1:
        raise ValueError(
            f"{name}: {path} must hold one token, ASCII and without spaces; "
            "openssl rand -hex 32 makes one"
        )
    return token
