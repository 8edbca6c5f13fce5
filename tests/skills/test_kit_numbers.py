"""Progress, statistics and pictures of the kit."""

from __future__ import annotations

import io
import random
import struct
import sys
import zlib

import pytest
from skills.targets import processes  # noqa: F401  puts the kit on the path

from kit import plots, statistics
from kit.errors import UsageError
from kit.job import Job
from kit.progress import Progress, duration


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, steps, total, seconds):
    clock = Clock()
    bar = Progress(stream, clock)
    for number in range(steps + 1):
        clock.now = number * seconds
        bar.show(number, total, "steps")
    return stream.getvalue()


def test_without_a_terminal_a_line_a_quarter_when_it_takes_long():
    lines = shown(io.StringIO(), 100, 100, 0.2).splitlines()
    assert lines == [
        "25/100 steps about 15 s left",
        "50/100 steps about 10 s left",
        "75/100 steps about 5 s left",
        "100/100 steps",
    ]
    assert shown(io.StringIO(), 100, 100, 0.01) == ""


def test_a_second_pass_begins_anew():
    clock, stream = Clock(), io.StringIO()
    bar = Progress(stream, clock)
    for turn in range(2):
        for number in range(5):
            clock.now = 100.0 * turn + 10.0 * number
            bar.show(number, 4)
    assert (
        stream.getvalue().splitlines()
        == [*("1/4 about 30 s left", "2/4 about 20 s left", "3/4 about 10 s left", "4/4")] * 2
    )


def test_on_a_terminal_a_bar_in_place():
    drawn = shown(Terminal(), 4, 4, 5.0).split("\r")
    assert drawn[2] == "[#####...............] 1/4 steps about 15 s left\033[K"
    assert drawn[-1] == "[####################] 4/4 steps\033[K\n"
    assert len(shown(Terminal(), 1000, 1000, 0.001).split("\r")) < 15


def test_a_job_shows_its_progress(tmp_path, capsys):
    work = Job(tmp_path, "custom-check")
    work.bar = Progress(clock=iter(range(0, 1000, 5)).__next__)
    for number in range(1, 9):
        work.progress(number, 8, "steps")
    assert [line[:9] for line in capsys.readouterr().err.splitlines()] == [
        "2/8 steps",
        "4/8 steps",
        "6/8 steps",
        "8/8 steps",
    ]


def test_durations_are_written_for_people():
    assert [duration(s) for s in (0.2, 8, 200, 9000)] == ["1 s", "8 s", "3 min", "2.5 h"]


def test_the_interval_of_a_mean_has_students_quantiles():
    """t(0.975) is 4.3027 for 2 degrees of freedom, 2.7764 for 4, 2.2281 for 10."""
    for count, quantile in ((3, 4.3027), (5, 2.7764), (11, 2.2281)):
        values = [float(i) for i in range(count)]
        spread = ((count**2 - 1) / 12 * count / (count - 1)) ** 0.5
        found = statistics.mean(values)
        assert found.value == (count - 1) / 2
        reach = (found.high - found.low) / 2
        assert reach == pytest.approx(quantile * spread / count**0.5, rel=1e-4)


def test_welch_and_the_paired_test_are_those_of_the_books():
    """Values computed by hand: Welch t 1.0 with 8 degrees of freedom; pairs 0, 1, 2 with sd 1."""
    found = statistics.welch([2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.value == 1.0 and found.p == pytest.approx(0.34659, abs=1e-5)
    assert found.high - found.value == pytest.approx(2.3060, abs=1e-4) == found.value - found.low
    unequal = statistics.welch([0.0, 10.0], [1.0, 1.0, 1.0])
    assert unequal.high - unequal.value == pytest.approx(12.7062 * 5.0, rel=1e-4)
    pairs = statistics.paired([1.0, 3.0, 5.0], [1.0, 2.0, 3.0])
    assert pairs.value == 1.0 and pairs.high - 1.0 == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert pairs.p == pytest.approx(0.22540, abs=1e-5)


def test_a_share_has_the_exact_interval():
    assert statistics.binomial(0, 10)[1:] == pytest.approx((0.0, 0.30850), abs=1e-5)
    assert statistics.binomial(5, 10)[1:] == pytest.approx((0.18709, 0.81291), abs=1e-5)
    assert statistics.binomial(3, 4).value == 0.75


def test_a_slope_has_its_interval():
    exact = statistics.slope([0, 1, 2, 3], [1.0, 3.0, 5.0, 7.0])
    assert exact == pytest.approx((2.0, 2.0, 2.0))
    found = statistics.slope([0, 1, 2], [0.0, 0.0, 3.0])
    assert found.value == pytest.approx(1.5)
    assert found.high - 1.5 == pytest.approx(12.7062 * 0.8660254, rel=1e-5)


def test_the_interval_of_a_slope_holds_the_truth_as_often_as_it_says():
    draw = random.Random(0)
    x = [0.0, 1.0, 2.0, 3.0, 4.0]
    held = 0
    for _ in range(300):
        found = statistics.slope(x, [0.5 * v + draw.gauss(0, 1) for v in x])
        held += found.low <= 0.5 <= found.high
    assert 0.90 <= held / 300 <= 0.99


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: statistics.mean([1.0]), "1 values are too few; at least 2"),
        (lambda: statistics.mean([1.0, float("nan")]), "not finite"),
        (lambda: statistics.welch([1.0, 1.0], [2.0, 2.0]), "no spread to test against"),
        (lambda: statistics.paired([1.0, 2.0], [2.0, 3.0]), "no spread to test against"),
        (lambda: statistics.paired([1.0, 2.0], [1.0, 2.0, 3.0]), "2 and 3 values are no pairs"),
        (lambda: statistics.binomial(3, 2), "3 of 2 is no share"),
        (lambda: statistics.slope([1, 1, 1], [1.0, 2.0, 3.0]), "all x are equal"),
        (lambda: statistics.slope([1, 2], [1.0, 2.0]), "2 values are too few; at least 3"),
        (lambda: statistics.slope([1, 2, 3], [1.0] * 4), "3 x and 4 y are no points"),
    ],
)
def test_what_cannot_be_computed_is_no_number(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_missing_scipy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UsageError, match=r"lacks; .* -m pip install scipy, or set --python"):
        statistics.mean([1.0, 2.0])


def test_a_missing_library_is_told_in_one_line(monkeypatch, capsys):
    assert plots.available() and statistics.available() and capsys.readouterr().err == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not plots.available() and not statistics.available()
    assert capsys.readouterr().err == f"no picture: {sys.executable} has no matplotlib\n"


def pixels(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24]), zlib.crc32(data)


def test_pictures_have_one_look_and_the_same_bytes_each_time(tmp_path):
    from matplotlib import pyplot

    before = (dict(pyplot.rcParams), pyplot.get_fignums())
    sizes = []
    for name in ("first.png", "second.png"):
        made, panels = plots.figure("Loss of one batch", columns=2)
        for panel in panels:
            panel.set(xlabel="step", ylabel="loss (nats)")
            plots.curve(panel, [3.0, float("nan"), 1.0], label="run")
            panel.axhline(0.5, **plots.LIMIT)
        assert plots.save(made, tmp_path / name) == [str(tmp_path / name)]
        sizes.append(pixels(tmp_path / name))
    assert sizes[0] == sizes[1] and sizes[0][0] == (1408, 396)
    assert panels[0].lines[0].get_color() == plots.COLOURS[0]
    assert (dict(pyplot.rcParams), pyplot.get_fignums()) == before


def test_a_panel_without_labels_is_refused(tmp_path):
    made, panels = plots.figure("Nothing said")
    panels[0].plot([1, 2])
    with pytest.raises(ValueError, match="lacks a label"):
        plots.save(made, tmp_path / "x.png")


def distance(first, second):
    """How far apart two colours are in CIE L*a*b*."""
    from matplotlib.colors import to_rgb

    def lab(colour):
        line = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
        white = (0.9505, 1.0, 1.089)
        f = [
            (sum(a * b for a, b in zip(row, line, strict=True)) / w) ** (1 / 3)
            for row, w in zip(rows, white, strict=True)
        ]
        return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])

    return sum((a - b) ** 2 for a, b in zip(lab(first), lab(second), strict=True)) ** 0.5


def as_seen_without_red(colour):
    """A protanope's view by Vienot's matrix, in linear light."""
    from matplotlib.colors import to_rgb

    r, g, b = (c**2.2 for c in to_rgb(colour))
    seen = (0.1124 * r + 0.8876 * g, 0.1124 * r + 0.8876 * g, 0.004 * r - 0.004 * g + b)
    return tuple(min(1.0, max(0.0, c)) ** (1 / 2.2) for c in seen)


def test_the_colours_differ_for_those_who_do_not_see_red():
    seen = [as_seen_without_red(colour) for colour in plots.COLOURS]
    pairs = [(a, b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(distance(a, b) for a, b in pairs) > 12
    assert distance(as_seen_without_red("#7F7F00"), as_seen_without_red("#A06A00")) < 12
