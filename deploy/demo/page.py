"""How the demo writes on a terminal: streamed text between margins, with marks in it."""

import shutil
import sys

MARGIN = "         "


class Style:
    """Escape codes on a terminal, empty strings elsewhere."""

    def __init__(self):
        names = {"plain": 0, "bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}
        for name, code in names.items():
            setattr(self, name, f"\x1b[{code}m" if sys.stdout.isatty() else "")


STYLE = Style()


class Page:
    """Writes streamed text between margins, a word at a time. Off a terminal it passes through unchanged."""

    def __init__(self):
        self.wraps = sys.stdout.isatty()
        self.width = min(shutil.get_terminal_size().columns, 100) - len(MARGIN) - 1
        self.column = 0
        self.word = ""

    def write(self, text: str) -> None:
        if not self.wraps:
            print(text, end="", flush=True)
            return
        for character in text:
            if character in " \n":
                self._put_word()
                self._break_line() if character == "\n" else self._put(" ")
            else:
                self.word += character
        sys.stdout.flush()

    def mark(self, text: str) -> None:
        """Puts a mark where the text stands now, in the middle of a word if need be."""
        self._put_word()
        if self.wraps and self.column + len(text) > self.width:
            self._break_line()
        self.column += len(text)
        print(f"{STYLE.plain}{STYLE.red}{text}{STYLE.plain}{STYLE.bold}", end="", flush=True)

    def end(self) -> None:
        self._put_word()
        print(STYLE.plain, flush=True)

    def _put_word(self) -> None:
        if self.column + len(self.word) > self.width and self.column > 0:
            self._break_line()
        self._put(self.word)
        self.word = ""

    def _put(self, text: str) -> None:
        if self.column == 0:
            text = text.lstrip(" ")
        sys.stdout.write(text)
        self.column += len(text)

    def _break_line(self) -> None:
        sys.stdout.write("\n" + MARGIN)
        self.column = 0


def conversation_begins(prompt: str) -> Page:
    """Writes the question and the name of the one who answers; the answer goes to the page."""
    print(f"  {STYLE.dim}you  {STYLE.plain}  {prompt}\n  {STYLE.dim}model{STYLE.plain}  {STYLE.bold}", end="", flush=True)
    return Page()
