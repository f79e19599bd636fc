"""Prompts for benches of speculation: three kinds whose answers repeat the prompt, and one whose answers do not."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """Prompts of one kind.

    Attributes:
        prompts: users' messages.
        repeats: whether a good answer repeats much of the prompt.
        temperature: of the answers; greedy answers of a small model to open questions run in circles, which would be
            repetitive text as well.
    """

    prompts: tuple[str, ...]
    repeats: bool
    temperature: float


_CODE = (
    """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        return self.balance
""",
    """def read_rows(path, separator):
    rows = []
    with open(path) as lines:
        for line in lines:
            fields = line.strip().split(separator)
            if len(fields) < 3:
                continue
            rows.append({"name": fields[0], "city": fields[1], "age": int(fields[2])})
    return rows

def oldest(rows):
    best = rows[0]
    for row in rows:
        if row["age"] > best["age"]:
            best = row
    return best
""",
    """import random

class Deck:
    def __init__(self):
        self.cards = []
        for suit in ["hearts", "spades", "clubs", "diamonds"]:
            for value in range(1, 14):
                self.cards.append((suit, value))

    def shuffle(self):
        random.shuffle(self.cards)

    def draw(self, count):
        drawn = self.cards[:count]
        self.cards = self.cards[count:]
        return drawn
""",
    """function total(items, rate) {
  let sum = 0;
  for (const item of items) {
    if (item.quantity > 0) {
      sum += item.price * item.quantity;
    }
  }
  const tax = sum * rate;
  return sum + tax;
}

function report(items, rate) {
  for (const item of items) {
    console.log(item.name + ": " + item.price * item.quantity);
  }
  console.log("total: " + total(items, rate));
}
""",
)
_EDITS = (
    "Add a docstring to each method",
    "Rename separator to delimiter everywhere",
    "Rename cards to stack everywhere",
    "Rename sum to subtotal everywhere",
)
_RECORDS = (
    (
        "name, city, age",
        "Anna Berg, Oslo, 31; Tom Reed, Leeds, 45; Mia Rossi, Turin, 28; Jan Novak, Brno, 52",
    ),
    (
        "sku, colour, price",
        "A-100, red, 12.50; A-101, blue, 13.50; B-220, green, 8.25; B-221, black, 9.75",
    ),
    (
        "city, country, population",
        "Lyon, France, 522000; Graz, Austria, 292000; Porto, Portugal, 231000; Bergen, Norway, 285000",
    ),
    (
        "date, room, temperature",
        "2024-03-01, kitchen, 21.5; 2024-03-01, cellar, 12.0; 2024-03-02, kitchen, 20.5; 2024-03-02, cellar, 11.5",
    ),
)
_ARTICLES = (
    (
        "The harbour council voted on Tuesday to close the old fish market. Mayor Elin Strand said that the roof "
        "of the hall had become a danger to visitors. The traders who have worked there for forty years will move "
        "to the northern pier until the spring. Karl Moen, who sells cod and herring, said that the council had "
        "promised a new hall three times before. The new building will cost eleven million and open in two years."
    ),
    (
        "Researchers at the university have found that bees remember the smell of a flower for more than a week. "
        "The team of Ana Lopes trained two hundred bees to visit blue paper flowers that smelled of mint. Nine "
        "days later most of the bees still chose mint over lemon. Lopes said that the memory of such a small "
        "animal had surprised her. The study will continue with wild bees in the summer."
    ),
    (
        "The night train from Vienna to Rome was cancelled for the third time this month. The railway said that a "
        "landslide had covered both tracks near the tunnel at Tarvisio. About four hundred passengers were taken "
        "to Villach by bus and spent the night in a sports hall. Maria Conti, who was on her way to a wedding, "
        "said that nobody had told them anything for five hours. The line will stay closed until Friday."
    ),
    (
        "The library of the small town of Ferndale has lent its last paper book. Director Samuel Price said that "
        "fewer than ten readers a day had come to the reading room last year. The shelves will be sold, and the "
        "house will become a music school in September. Residents who signed a petition said that the council had "
        "never asked them. The books have been given to schools in the county."
    ),
)
_OPEN = (
    "Write a short story about a girl who finds a door in an old oak tree.",
    "Explain to a child why the sky is blue in the day and red in the evening.",
    "What should I think about before I move to another country for work?",
    "Describe a day on a sailing ship two hundred years ago.",
)

KINDS: dict[str, Kind] = {
    "code edit": Kind(
        tuple(
            f"{edit} in this code, change nothing else, and print the whole code.\n\n```\n{code}```"
            for edit, code in zip(_EDITS, _CODE, strict=True)
        ),
        True,
        0.0,
    ),
    "JSON records": Kind(
        tuple(
            f"Write these records as a JSON list of objects with the keys {keys}.\n\n{records}"
            for keys, records in _RECORDS
        ),
        True,
        0.0,
    ),
    "summary with quotes": Kind(
        tuple(
            f"Summarise this text and quote its most important sentences word for word.\n\n{text}" for text in _ARTICLES
        ),
        True,
        0.0,
    ),
    "open text": Kind(_OPEN, False, 0.8),
}
