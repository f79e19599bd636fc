"""The speculation bench's numbers as text."""

from __future__ import annotations

from typing import Any

from jaxserve.bench.fence_report import busy_note
from jaxserve.bench.machine import sentence
from jaxserve.bench.table import median, spread, table

CLEARLY_FASTER, NOT_SLOWER = 1.2, 0.95  # wanted, times plain: on text that repeats itself, and on text that does not


def accepted_share(way: dict[str, Any]) -> float | None:
    """Of the drafts of all rounds; None when there were none."""
    drafted = sum(way["drafted"])
    return sum(way["accepted"]) / drafted if drafted else None


def rates(found: dict[str, Any]) -> str:
    """A row per kind of text, batch and way: medians (least-most) of the rounds."""
    head = ("text", "batch", "way", "tokens/s", "times plain", "tokens a step", "drafts", "held")
    rows = []
    for cell in found["cells"]:
        for name, way in cell["ways"].items():
            held = accepted_share(way)
            rows.append([
                cell["kind"], str(cell["batch"]), name, spread(way["rate"], 1), spread(way["ratio"], 2),
                f"{cell['num_tokens'] / sum(way['steps']):.2f}", str(sum(way["drafted"])),
                "-" if held is None else f"{held:.0%}",
            ])  # fmt: skip
    return table("Tokens a second, beside plain decoding in the same round", head, rows)


def compact_rates(found: dict[str, Any]) -> str:
    """A row per kind of text and batch."""
    ways = [way for way in found["settings"]["ways"] if way != "plain"]
    head = ("text", "batch", "plain, tokens/s", *(f"{way}, times plain" for way in ways))
    rows = [
        [
            cell["kind"], str(cell["batch"]), f"{median(cell['ways']['plain']['rate']):.0f}",
            *(f"x {median(cell['ways'][way]['ratio']):.2f}" for way in ways),
        ]
        for cell in found["cells"]
    ]  # fmt: skip
    return table("Speculation beside plain decoding", head, rows)


def verify_name(tokens: int) -> str:
    """What a step of ``verify`` is."""
    return {0: "decode, overlapped", 1: "decode, not overlapped"}.get(tokens, f"verify {tokens} tokens")


def verify_costs(found: dict[str, Any]) -> str:
    """A row per batch and size of step."""
    rows = [
        [str(each["batch"]), verify_name(each["tokens"]), spread(each["step_ms"], 1), spread(each["ratio"], 2)]
        for each in found["verify"]
    ]
    return table("A step that verifies drafts, beside one decode step", ("batch", "step", "ms", "times decode"), rows)


def verdicts(found: dict[str, Any]) -> list[str]:
    """What was wanted, and what came out."""
    lines = []
    for repeats, text, wanted in (
        (True, "text that repeats itself", CLEARLY_FASTER),
        (False, "text that does not", NOT_SLOWER),
    ):
        ratios = [
            (median(way["ratio"]), f"{name}, {cell['kind']}, batch {cell['batch']}")
            for cell in found["cells"]
            if cell["repeats"] is repeats
            for name, way in cell["ways"].items()
            if name in ("NGRAM", "relay")  # what is wanted of them; a head may be trained for less
        ]
        if ratios:
            worst, where = min(ratios)
            verdict = "reached" if worst >= wanted else "MISSED"
            lines.append(f"- On {text}, at least {wanted} times plain: {verdict}; least {worst:.2f} ({where}).")
    return lines


def above(found: dict[str, Any]) -> str:
    """What was measured, where and how."""
    settings = found["settings"]
    return (
        f"{sentence(found['machine'])}\njax {found['machine']['jax']} on {found['machine']['platform']}, "
        f"{found['model']}, at most {settings['max_tokens']} tokens per answer, equal in all ways; "
        f"{settings['rounds']} rounds, the ways taking turns, each with an empty trie; {found['seconds']:.0f} s.\n"
    )


def whole(found: dict[str, Any]) -> str:
    """Everything."""
    lines = [busy_note(found) + above(found), rates(found), verify_costs(found), *verdicts(found)]
    if found["left_out"]:
        seconds = found["settings"]["max_seconds"]
        lines.append(f"Left out, because {seconds:.0f} s were over: {'; '.join(found['left_out'])}.")
    return "\n".join(lines) + "\n"
