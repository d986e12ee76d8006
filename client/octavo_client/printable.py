"""Text from elsewhere, made fit for a terminal."""


def printable(text: str) -> str:
    """Return text that came from elsewhere without what a terminal would take as a command."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
