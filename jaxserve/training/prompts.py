"""Instructions for a model to answer when the user brings no text: templates filled with words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

_TOPICS = (
    "photosynthesis", "the water cycle", "black holes", "the French Revolution", "inflation", "machine learning",
    "plate tectonics", "the immune system", "supply and demand", "the Roman Empire", "gravity", "DNA", "volcanoes",
    "electric cars", "the printing press", "bees and pollination", "vaccines", "the Great Wall of China", "jazz music",
    "renewable energy", "the stock market", "chess openings", "the human heart", "coral reefs", "quantum computers",
    "the Silk Road", "sleep", "glaciers", "the Renaissance", "batteries", "democracy", "the moon landing", "recycling",
    "Shakespeare", "earthquakes", "the internet", "tea", "bridges", "whales", "cryptography", "compound interest",
    "the Industrial Revolution", "antibiotics", "rainforests", "satellites", "meditation", "sound waves", "spiders",
    "the Olympic Games", "soil", "nuclear power", "the scientific method", "lighthouses", "public libraries",
)  # fmt: skip
_PLACES = (
    "Paris", "Tokyo", "Cairo", "New York", "Rome", "Sydney", "London", "Istanbul", "Rio de Janeiro", "Kyoto", "Berlin",
    "Nairobi", "Mexico City", "Mumbai", "Lisbon", "Reykjavik", "Toronto", "Athens", "Singapore", "Prague",
)  # fmt: skip
_JOBS = (
    "teacher", "nurse", "software engineer", "chef", "gardener", "pilot", "librarian", "carpenter", "journalist",
    "astronaut", "farmer", "detective", "musician", "bus driver", "architect", "lifeguard", "baker", "sailor",
)  # fmt: skip
_THINGS = (
    "a lost key", "an old lighthouse", "a talking cat", "a broken clock", "a hidden letter", "a small robot",
    "a paper boat", "a stolen painting", "a shy dragon", "a forgotten garden", "a red umbrella", "a night train",
    "a magic violin", "a snowstorm", "a secret recipe", "a wooden bridge", "a lonely star", "a stray dog",
)  # fmt: skip
_NAMES = ("Maria", "Ahmed", "Li Wei", "Sofia", "James", "Priya", "Tom", "Elena", "Kwame", "Yuki", "Anna", "Diego")
_FUNCTIONS = (
    "reverses a string", "checks whether a number is prime", "sorts a list of dictionaries by a key",
    "counts the words in a text", "computes the factorial of a number", "finds the largest element of a list",
    "merges two sorted lists", "removes duplicates from a list", "reads a CSV file and returns its rows",
    "converts Celsius to Fahrenheit", "checks whether a string is a palindrome", "computes Fibonacci numbers",
    "flattens a nested list", "validates an email address", "finds the greatest common divisor of two numbers",
    "counts vowels in a string", "rotates a matrix by 90 degrees", "groups words by their first letter",
    "computes the average of a list of numbers", "performs a binary search", "generates a random password",
    "parses a date like 2024-03-01", "implements a stack with push and pop", "transposes a matrix",
)  # fmt: skip
_LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "Go", "Rust")
_RECORDS = {
    "employee": ("name", "department", "salary", "start_date"),
    "book": ("title", "author", "year", "isbn"),
    "product": ("name", "price", "quantity", "category"),
    "city": ("name", "country", "population", "area_km2"),
    "student": ("name", "age", "grade", "email"),
    "movie": ("title", "director", "year", "rating"),
    "order": ("order_id", "customer", "total", "status"),
    "animal": ("species", "habitat", "diet", "lifespan_years"),
}
_SENTENCES = (
    "The meeting was moved to Thursday because the manager had to travel to another city.",
    "Our new printer is fast and quiet, but the ink is expensive and hard to find.",
    "She opened the window, looked at the sea and decided to stay for one more week.",
    "The bakery on the corner sells fresh bread every morning except on Mondays.",
    "Due to heavy rain the match was cancelled and all tickets will be refunded.",
    "He forgot his keys at the office and had to wait outside for two hours.",
    "The company plans to open three new stores and hire forty people next year.",
    "My grandmother taught me to cook when I was ten years old.",
    "The train was late again, so we missed the beginning of the concert.",
    "Please send the signed contract back before the end of the month.",
    "The museum offers free entry for children and a guided tour at noon.",
    "We repaired the old bicycle and painted it blue over the weekend.",
)
_PASSAGES = (
    "The town of Millbrook lies between two rivers. In 1871 a fire destroyed most of its wooden "
    "houses, and the council "
    "decided that new buildings had to be made of brick. Today the brick houses are protected, and visitors come from "
    "far away to see them. The old fire station is now a small museum.",
    "Honey bees live in colonies of up to sixty thousand insects. A single queen lays all eggs. Worker bees collect "
    "nectar, build combs and defend the hive. In winter the colony forms a tight cluster and shivers to keep warm, "
    "eating the honey it stored during summer.",
    "The city library will close for renovation from June to September. During this time books can be borrowed from a "
    "mobile library, which stops at the market square on weekdays. The new reading room will have twice as many seats, "
    "and a cafe will open on the ground floor.",
    "Researchers tested a new battery made of sodium instead of lithium. It stores a little less energy, but its "
    "materials are cheap and found almost everywhere. After two thousand cycles the battery kept ninety percent of its "
    "capacity. The team hopes to build a first factory within three years.",
    "Last spring the village school planted one hundred apple trees. Every class looks after ten of them. The pupils "
    "measure how much the trees grow and write down when they flower. In autumn the apples will be sold at the market, "
    "and the money will pay for a trip to the mountains.",
    "A container ship lost power near the coast on Tuesday night. Two tugs reached it within an hour "
    "and towed it to the "
    "harbour. No oil was spilled and nobody was hurt. Engineers believe that dirty fuel blocked the main engine; the "
    "owner promised a full report by the end of the week.",
)  # fmt: skip
_CODE = (
    "def area(width, height):\n    result = width * height\n    return result\n\n"
    "def perimeter(width, height):\n    result = 2 * (width + height)\n    return result\n",
    "class Counter:\n    def __init__(self):\n        self.counts = {}\n\n    def add(self, word):\n"
    "        if word not in self.counts:\n            self.counts[word] = 0\n        self.counts[word] += 1\n",
    "def load(path):\n    values = []\n    with open(path) as file:\n        for line in file:\n"
    "            values.append(float(line))\n    return values\n\ndef mean(values):\n    return "
    "sum(values) / len(values)\n",
    "function greet(users) {\n  for (const user of users) {\n    if (user.active) {\n"
    '      console.log("Hello, " + user.name);\n    }\n  }\n}\n',
    "def find(items, wanted):\n    for index in range(len(items)):\n        if items[index] == wanted:\n"
    "            return index\n    return -1\n",
    "class Light:\n    def __init__(self, room):\n        self.room = room\n        self.on = False\n\n"
    "    def toggle(self):\n        self.on = not self.on\n        return self.on\n",
)
_EDITS = (
    "Rename the variable that holds the result and return the whole code.", "Add a docstring to every function.",
    "Add type hints and return the complete code.", "Add comments that explain each line.",
    "Rewrite the code so that it handles empty input.", "Repeat the code and then explain what it does.",
)  # fmt: skip
_PLAIN = (
    "Explain {topic} in simple terms.", "What is {topic}?", "Give me five facts about {topic}.",
    "Write a short paragraph about {topic}.", "Explain {topic} to a ten-year-old.", "Why does {topic} matter?",
    "List three advantages and three disadvantages of {topic}.", "Write a quiz with four questions about {topic}.",
    "What are common misconceptions about {topic}?", "Summarise the history of {topic} in a few sentences.",
    "Compare {topic} and {topic2}.", "Write a poem about {topic}.", "Write an outline for an essay on {topic}.",
    "Give a short definition of {topic} and an example.", "How would you teach {topic} to beginners?",
    "What should a tourist see in {place}?", "Plan a three-day trip to {place}.",
    "Write a postcard from {place}.", "Describe the weather and food of {place}.",
    "What does a {job} do all day?", "List the skills a {job} needs.", "Write a job advert for a {job}.",
    "Interview questions for a {job}, please.", "Write a letter of thanks to a {job}.",
    "Write a short story about {thing} and a {job}.", "Tell a story that begins with {thing}.",
    "Write a dialogue between a {job} and a {job2} about {topic}.", "Write a haiku about {thing}.",
    "{name} has {a} apples and buys {b} more. How many are there now? Explain step by step.",
    "What is {a} times {b}? Show your work.", "A train travels {a} km in {c} hours. How fast is it?",
    "{name} earns {a} dollars an hour and works {b} hours. How much is that?",
    "Write an email from {name} to {name2} about {thing}.", "Write a birthday message for {name}, a {job}.",
    "Give step-by-step instructions for making tea in {place}.", "List ten words related to {topic}.",
    "Write a {language} function that {function}.", "Show how to write code that {function} in {language}.",
    "Explain how a function that {function} works, with an example in {language}.",
    "Write unit tests for a Python function that {function}.",
    "How can I learn about {topic} in a month?", "Write a tweet about {topic}.",
    "Make a table with three rows comparing {topic} and {topic2}.", "Name some famous people connected with {place}.",
)  # fmt: skip
_ON_TEXT = (
    "Rewrite this sentence in a more formal style: {sentence}", "Make this sentence shorter: {sentence}",
    "Correct and repeat this sentence, then translate it to French: {sentence}",
    "Turn this sentence into a question: {sentence}", "List the nouns in this sentence: {sentence}",
    "Summarise this text, quoting the most important sentence:\n\n{passage}",
    "Write three questions about this text and answer them:\n\n{passage}",
    "Repeat this text, but in the present tense:\n\n{passage}", "Give the text below a title:\n\n{passage}",
    "What happened? Answer in two sentences.\n\n{passage}", "{edit}\n\n```\n{code}```",
    "What does this code do?\n\n```\n{code}```", "Translate this code to {language}:\n\n```\n{code}```",
    "Write a JSON list of {n} records of type {record} with the keys {keys}.",
    "Add a key \"id\" to every record and return the JSON:\n\n{records}",
    "Convert these records to a Markdown table:\n\n{records}",
    "Write a Python dataclass for records like these:\n\n{records}",
)  # fmt: skip


def instructions(seed: int = 0) -> Iterator[str]:
    """An endless, reproducible stream of users' messages, without repetition.

    Two of three are short questions; the others bring a sentence, a text, code or records to work on.
    """
    draw = random.Random(seed)
    seen: set[str] = set()
    while True:
        template = draw.choice(_PLAIN if draw.random() < 2 / 3 else _ON_TEXT)
        topic, topic2 = draw.sample(_TOPICS, 2)
        job, job2 = draw.sample(_JOBS, 2)
        name, name2 = draw.sample(_NAMES, 2)
        record, keys = draw.choice(list(_RECORDS.items()))
        text = template.format(
            topic=topic, topic2=topic2, job=job, job2=job2, name=name, name2=name2, record=record, keys=", ".join(keys),
            place=draw.choice(_PLACES), thing=draw.choice(_THINGS), function=draw.choice(_FUNCTIONS),
            language=draw.choice(_LANGUAGES), sentence=draw.choice(_SENTENCES), passage=draw.choice(_PASSAGES),
            code=draw.choice(_CODE), edit=draw.choice(_EDITS), a=draw.randint(3, 90), b=draw.randint(2, 40),
            c=draw.randint(2, 9), n=draw.randint(2, 5), records=_records(draw, keys),
        )  # fmt: skip
        if text not in seen:
            seen.add(text)
            yield text


def _records(draw: random.Random, keys: tuple[str, ...]) -> str:
    """A few JSON records with made-up values."""
    words = [*_NAMES, *_PLACES]
    rows = [
        {key: draw.choice(words) if i < 2 else draw.randint(1, 2024) for i, key in enumerate(keys)}
        for _ in range(draw.randint(2, 4))
    ]
    return json.dumps(rows, indent=2)
