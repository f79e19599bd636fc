"""The picture of one step: which step, what it says, and that it can be read."""

from __future__ import annotations

import dataclasses
import re
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.main import main
from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.timeline.drawing import STYLES, Drawing, Rect, Text, nice_step, text_width
from jaxserve.timeline.plot_html import render_html
from jaxserve.timeline.plot_image import render_image
from jaxserve.timeline.step_drawing import draw_steps
from jaxserve.timeline.step_view import SKIPPED_STEPS, StepView, complete_steps, median_step
from jaxserve.timeline.trace import Recording


@pytest.fixture
def views(recorded: Any) -> list[StepView]:
    """Fine and coarse, of steps that go on long after their reads."""
    runs = [recorded(long_steps=True, force_coarse_war_barrier=coarse) for coarse in (False, True)]
    return [median_step(run.host, run.device) for run in runs]


@pytest.fixture(params=["long steps", "short steps", "fine", "coarse"])
def drawing(request: pytest.FixtureRequest, views: list[StepView], recorded: Any) -> Drawing:
    runs = [recorded(num_tokens=20), recorded(num_tokens=20, force_coarse_war_barrier=True)]
    chosen = {"long steps": views, "short steps": [median_step(run.host, run.device) for run in runs],
              "fine": views[:1], "coarse": views[1:]}  # fmt: skip
    return draw_steps(chosen[request.param], "a subtitle")


def test_the_chosen_step_is_a_typical_one(views: list[StepView]) -> None:
    for view, fence in zip(views, ("fine:marker", "coarse:forced"), strict=True):
        assert view.fence == fence and view.num_steps >= 3
        assert view.before.step + 1 == view.step.step == view.after.step - 1


def test_no_other_step_is_nearer_to_the_medians(recorded: Any) -> None:
    run = recorded(num_tokens=20)
    chosen, others = median_step(run.host, run.device), complete_steps(run.host, run.device)[SKIPPED_STEPS:-1]
    medians = chosen.medians
    assert medians is not None and chosen.num_steps == len(others) > 8
    assert medians.period == statistics.median_low([v.times.period for v in others]) or len(others) % 2 == 0

    def distance(view: StepView) -> float:
        pairs = zip(dataclasses.astuple(view.times), dataclasses.astuple(medians), strict=True)
        period, execution, _, _, in_place, gap = (abs(value - median) / median for value, median in pairs)
        return period + execution + in_place + gap

    assert distance(chosen) == pytest.approx(min(distance(view) for view in others))


def test_rows_are_in_place_during_a_step_or_after_it(views: list[StepView]) -> None:
    fine, coarse = (view.times for view in views)
    assert fine.in_place < fine.execution and coarse.execution < coarse.in_place
    assert fine.execution > 45e6 and coarse.execution > 45e6
    assert coarse.held > 40e6 > fine.held


def test_times_are_differences_of_what_was_recorded(views: list[StepView]) -> None:
    for view in views:
        begin, end = view.step.begin_ns, view.step.end_ns
        read, read_after = view.step.record_on("read_done"), view.after.record_on("read_done")
        assert begin and end and read and read_after and view.writes[0].enqueue_ns and view.writes[-1].end_ns
        wanted = (read_after.time_ns - read.time_ns, end - begin, read.time_ns - begin,
                  view.writes[-1].end_ns - view.writes[0].enqueue_ns, view.writes[-1].end_ns - begin,
                  read_after.time_ns - end)  # fmt: skip
        assert dataclasses.astuple(view.times) == wanted


def test_a_recording_without_complete_steps_is_refused(recorded: Any) -> None:
    run = recorded(shared_read_marker=False)
    with pytest.raises(JaxserveError, match="no complete decode step"):
        median_step(run.host, run.device)


def test_the_title_says_the_finding(views: list[StepView]) -> None:
    assert re.fullmatch(
        r"Rows of the next step are in place [\d.]+ ms into a step \(fine fence\), "
        r"or after it has ended, at [\d.]+ ms \(coarse fence\)",
        draw_steps(views, "").title,
    )
    alone = draw_steps(views[1:], "").title
    assert alone == "Rows of the next step are in place only after a step has ended (coarse fence)"


def boxes(drawing: Drawing) -> list[tuple[Text, float, float]]:
    """(text, left, right) of every text."""
    found = []
    for text in drawing.shapes:
        if isinstance(text, Text):
            width = text_width(text.text, text.size, text.bold)
            left = text.x - {"start": 0.0, "middle": width / 2, "end": width}[text.anchor]
            found.append((text, left, left + width))
    return found


def test_texts_lie_on_the_canvas_and_not_on_each_other(drawing: Drawing) -> None:
    texts = boxes(drawing)
    assert len(texts) > 20
    for text, left, right in texts:
        assert left >= 0 and right <= drawing.width and text.size <= text.y <= drawing.height, text
    for i, (text, left, right) in enumerate(texts):
        for other, other_left, other_right in texts[i + 1 :]:
            apart = abs(text.y - other.y) >= 0.8 * min(text.size, other.size)
            assert apart or right <= other_left + 1 or other_right <= left + 1, (text, other)


def test_labels_of_arrows_stay_in_their_column(drawing: Drawing) -> None:
    lanes = [shape for shape in drawing.shapes if isinstance(shape, Rect) and shape.style == "lane"]
    labels = [box for box in boxes(drawing) if box[0].halo]
    assert "write_done(N+1)" in {label.text for label, _, _ in labels}
    for label, left, right in labels:
        assert any(lane.x <= left and right <= lane.x + lane.width for lane in lanes), label


def test_bars_lie_on_lanes_and_every_kind_is_in_the_legend(drawing: Drawing) -> None:
    rects = [shape for shape in drawing.shapes if isinstance(shape, Rect)]
    lanes = [rect for rect in rects if rect.style == "lane"]
    assert len(lanes) in (6, 12)
    bars = [rect for rect in rects if rect.tip]
    for bar in bars:
        assert any(
            lane.x - 0.1 <= bar.x and bar.x + bar.width <= lane.x + lane.width + 2 and lane.y <= bar.y for lane in lanes
        ), bar
    legend = {rect.style for rect in rects if not rect.tip and rect.style != "lane"}
    assert {bar.style for bar in bars} - {"plate"} <= legend == {name for name, s in STYLES.items() if s.legend}


@pytest.mark.parametrize(("name", "start"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.pdf", b"%PDF")])
def test_images_are_written(drawing: Drawing, tmp_path: Path, name: str, start: bytes) -> None:
    render_image(drawing, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_the_page_needs_nothing_else(drawing: Drawing, tmp_path: Path) -> None:
    path = tmp_path / "plot.html"
    render_html(drawing, path)
    page = path.read_text("utf-8")
    assert "<script" not in page and "src=" not in page and "@import" not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in page
    root = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    names = {"svg": "http://www.w3.org/2000/svg"}
    tips = [title.text or "" for title in root.iterfind(".//svg:title", names)]
    assert any(re.match(r"row writes held up [\d.]+ ms", tip) for tip in tips)
    assert any(re.match(r"wait target.(read|step)_done \d+: [\d.]+ ms", tip) for tip in tips)
    assert {text.text for text in root.iterfind(".//svg:text", names)} >= {"host", "schedule stream", "execution"}
    classes = {(shape.get("class") or "").split(" ")[0] for shape in root.iterfind(".//svg:rect", names)}
    assert {f".{name} {{" in page for name in classes if not name.startswith("ground-")} == {True}


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("style", ["collect", "compute", "other", "plate", "lane"])
def test_labels_stand_out_from_their_bars_in_light_and_dark(style: str) -> None:
    from jaxserve.timeline.drawing import TONES

    for ink, fill in ((TONES["ink"][0], STYLES[style].fill), (TONES["ink"][1], STYLES[style].dark_fill)):
        low, high = sorted((luminance(ink), luminance(fill)))
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_without_matplotlib_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["trace", "--model", "/no/such/model", "--plot", str(tmp_path / "p.png")]) == 2
    assert "pip install jaxserve[plot]" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="html"):
        render_image(Drawing(1, 1, ""), tmp_path / "p.png")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--batch", "0"], "--batch must be at least 1"),
        (["--steps", "3"], "--steps must be at least 8"),
        (["--batch", "4", "--max-running-requests", "2"], "--max-running-requests"),
        (["--force-coarse-war-barrier"], "--fence"),
        (["--plot", "plot.jpg"], "png"),
        (["-o", "trace.txt"], "json"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_loading(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--model", "/no/such/model", *flags]) == 2
    assert why in capsys.readouterr().err


def test_on_a_gpu_the_command_is_refused_and_a_trace_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert main(["trace", "--model", "/no/such/model"]) == 2
    assert "JAX_PLATFORMS=cpu" in capsys.readouterr().err
    (remark,) = Recording().start().stop().remarks
    assert "GPU are not recorded" in remark


def test_the_command_writes_trace_page_and_medians(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, plot = tmp_path / "trace.json", tmp_path / "plot.html"
    settings = ["--context-length", "32", "--page-size", "4", "--chunked-prefill-size", "8", "--backend", "xla"]
    command = ["trace", str(tiny), "--batch", "2", "--steps", "12", "-o", str(output), "--plot", str(plot)]
    assert main([*command, *settings]) == 0
    assert plot.read_text("utf-8").startswith("<!DOCTYPE html>") and output.stat().st_size > 10_000
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["fence", "fine:marker", "coarse:forced"]


def test_nice_steps_are_one_two_or_five() -> None:
    assert [nice_step(span, 5) for span in (1, 3, 8, 40, 130, 0.3)] == pytest.approx([0.2, 1, 2, 10, 50, 0.1])
    assert statistics.fmean([nice_step(s, 5) * 5 >= s for s in range(1, 200)]) == 1
