"""Prompts of the load test in five kinds, short enough for a context of 2048 bytes.

The kinds differ in how predictable the output is: an edit repeats its prompt, code repeats itself, chat does neither.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadPrompt:
    """A text taken as it is, or a chat as (role, content) pairs that go through the target's template."""

    name: str
    text: str = ""
    chat: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


def _chat(name: str, *said: str) -> LoadPrompt:
    """Lines said in turns, the user's first."""
    roles = ("user", "assistant")
    return LoadPrompt(f"chat/{name}", chat=tuple((roles[i % 2], line) for i, line in enumerate(said)))


_REPORT = """\
The harbour ferry stopped at noon on Tuesday after its starboard engine overheated. Forty-one passengers were on board.
A pilot boat towed the ferry back to the eastern quay, where everybody left it unhurt within half an hour. The operator
said that a cooling pump had failed, that the pump was replaced in spring, and that a second ferry would take over until
the cause was understood. The town will refund the tickets of that day."""

_NOTE = """\
Dear all, the meeting on monday is moved to wednesday at ten. Please bring the figures of the last quarter with you. We
will need about one hour. Anna will take the minutes. If you can not come, tell Anna before tuesday evening."""

_RECIPE = """\
Rinse the lentils until the water runs clear. Cook them with a bay leaf for twenty minutes. Meanwhile fry two onions
slowly in oil until they are brown. Stir half of the onions into the lentils with salt, cumin and the juice of a lemon.
Serve warm with the other half on top."""

_CONFIG = """\
server:
  host: 127.0.0.1
  port: 8080
  workers: 4
logging:
  level: info
  file: /var/log/app.log
cache:
  size: 256
  ttl: 300
"""

CHAT = (
    _chat("tides", "Why are there two high tides a day and not one?"),
    _chat("bicycle", "My bicycle chain keeps slipping under load. What should I check first?"),
    _chat(
        "train",
        "I want to travel from the coast to the mountains by train.",
        "That is a fine trip. How many days do you have, and do you like to walk?",
        "Three days, and yes, but not with a heavy bag. What would you suggest?",
    ),
    _chat("names", "Give me five names for a small bakery that opens before sunrise."),
    _chat(
        "sleep",
        "Is it true that one should not drink coffee in the afternoon?",
        "For many people it makes falling asleep harder, even six hours later.",
        "And tea?",
    ),
)

SUMMARISE = (
    LoadPrompt("summarise/ferry", f"{_REPORT}\n\nIn one sentence:"),
    LoadPrompt("summarise/note", f"{_NOTE}\n\nThe three most important points of this note are:\n1."),
    LoadPrompt("summarise/recipe", f"{_RECIPE}\n\nShopping list for this recipe:\n-"),
    LoadPrompt("summarise/headline", f"{_REPORT}\n\nA headline for this report, at most eight words:"),
)

EDIT = (
    LoadPrompt("edit/spelling", f"Text:\n{_NOTE}\n\nThe same text with Monday, Tuesday and Wednesday in capitals:\n"),
    LoadPrompt("edit/port", f"File:\n{_CONFIG}\nThe same file with port 9090 and eight workers:\n"),
    LoadPrompt("edit/quote", f"{_REPORT}\n\nWhat did the operator say? Quote the sentence word for word:\n"),
    LoadPrompt("edit/repeat", f"Copy this recipe without changing a word.\n\n{_RECIPE}\n\nCopy:\nRinse the lentils"),
    LoadPrompt("edit/append", f"File:\n{_CONFIG}\nThe same file with a section 'metrics' at its end:\n"),
)

CODE = (
    LoadPrompt(
        "code/stack",
        'class Stack:\n    """Last in, first out."""\n\n    def __init__(self):\n        self._items = []\n\n'
        "    def push(self, item):\n",
    ),
    LoadPrompt(
        "code/tests",
        "def clamp(value, low, high):\n    return max(low, min(high, value))\n\n\n"
        "def test_clamp_inside():\n    assert clamp(5, 0, 10) == 5\n\n\ndef test_clamp_below():\n",
    ),
    LoadPrompt(
        "code/sql",
        "CREATE TABLE books (id INTEGER PRIMARY KEY, title TEXT, year INTEGER, author_id INTEGER);\n"
        "CREATE TABLE authors (id INTEGER PRIMARY KEY, name TEXT);\n"
        "-- The number of books of each author since 2000, most first\nSELECT",
    ),
    LoadPrompt(
        "code/json",
        '[\n  {"id": 1, "name": "spoon", "price": 2.5, "stock": 40},\n'
        '  {"id": 2, "name": "fork", "price": 2.5, "stock": 35},\n  {"id": 3, "name": "knife",',
    ),
    LoadPrompt(
        "code/rename",
        "// before\nfunction area(a, b) {\n  const c = a * b;\n  return c;\n}\n\n"
        "// after: a is width, b is height, c is result\nfunction area(",
    ),
)

TRANSLATE = (
    LoadPrompt("translate/german", "English: Where is the nearest pharmacy, and is it open on Sundays?\nGerman:"),
    LoadPrompt(
        "translate/french",
        "English: Good morning.\nFrench: Bonjour.\nEnglish: Thank you very much.\nFrench: Merci beaucoup.\n"
        "English: The bread is still warm.\nFrench:",
    ),
    LoadPrompt("translate/spanish", "Translate to Spanish.\n\nThe bus leaves at seven. Do not be late.\n\nSpanish:"),
    LoadPrompt("translate/back", "Deutsch: Der Zug fährt heute von Gleis drei, nicht von Gleis fünf.\nEnglish:"),
)

PROMPTS = (*CHAT, *SUMMARISE, *EDIT, *CODE, *TRANSLATE)
KINDS = tuple(dict.fromkeys(prompt.kind for prompt in PROMPTS))
