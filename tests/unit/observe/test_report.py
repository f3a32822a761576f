"""The report: a page that stands alone, its charts and its tables."""

from __future__ import annotations

import base64
import math
import re
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from paceline.base.errors import DataError
from paceline.observe.charts import line_chart, png_uri, ticks
from paceline.observe.classes import accuracy, confusion_matrix, per_class
from paceline.observe.report import Picture, Report


class Balanced(HTMLParser):
    """Fails where an element is closed that was not open."""

    alone = {"meta", "img"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attributes):
        if tag not in self.alone:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def whole():
    matrix = confusion_matrix([0, 0, 1, 1], [0, 1, 1, 1], 2)
    report = Report("Cats & <dogs>", "two epochs")
    report.numbers({"accuracy": "75 %"})
    report.curves({"Loss": {"training": [(1, 0.9), (2, math.nan), (3, 0.4)]}, "Empty": {}}, x_label="epoch")
    report.confusion(matrix, ["cat", "dog"])
    grey, colour = np.zeros((4, 3), np.uint8), np.zeros((4, 3, 3), np.uint8)
    report.images("Some", [Picture(grey, "cat", "cat"), Picture(colour, "dog", "cat")])
    report.facts({"world": "2 processes"}, folded={"plan": "a < b"})
    return report


def test_the_page_stands_alone_and_is_well_formed(tmp_path):
    path = whole().write(tmp_path / "deep" / "report.html")
    page = path.read_text()
    checker = Balanced()
    checker.feed(page)
    assert checker.open == []
    assert not re.search(r'(src|href)="(?!data:)|url\(|<script|@import', page)
    assert "Cats &amp; &lt;dogs&gt;" in page and "a &lt; b" in page
    assert page.count('class="wrong"') == 1 and "is cat" in page


def test_a_page_is_readable_on_a_phone():
    page = whole().html()
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert all("viewBox" in tag for tag in re.findall("<svg[^>]*>", page))
    phone = page.partition("@media (max-width: 560px)")[2].partition("</style>")[0]
    # Drawings of 460 units are scaled to about 350 pixels there.
    size = float(re.search(r"svg\.chart text { font-size: ([\d.]+)px", phone)[1])
    assert size * 350 / 460 >= 12
    assert "pre { font" in page and "white-space: pre-wrap" in page


def test_a_line_with_a_gap_and_the_last_value_in_its_legend():
    chart = line_chart({"loss": [(1, 0.9), (2, math.nan), (3, 0.4)]}, "epoch", ".2f")
    assert re.search(r'd="M[\d. ]+ M[\d. ]+"', chart)
    assert "<b>0.40</b>" in chart and "loss, epoch 3: 0.40" in chart


@pytest.mark.parametrize("points", [[], [(1, math.nan)], [(1, 0.5)], [(1, 0.0), (2, 0.0)]])
def test_charts_of_few_or_equal_points(points):
    chart = line_chart({"loss": points})
    assert "nan" not in chart.replace('"none"', "")


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.03, 0.97, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (1, 12, [0, 5, 10, 15]), (3, 3, [3])]
)
def test_ticks_are_round_and_span(low, high, expected):
    found = ticks(low, high, 5)
    assert found[0] <= low and found[-1] >= high
    if len(expected) > 1:
        assert found == pytest.approx(expected)


def test_whole_ticks_stay_inside():
    assert ticks(1, 12, 6, whole=True) == [2, 4, 6, 8, 10, 12]
    assert ticks(1, 2, 6, whole=True) == [1, 2]


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
def test_a_png_holds_the_pixels(shape):
    from io import BytesIO

    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    data = base64.b64decode(png_uri(pixels).split(",")[1])
    assert data.startswith(b"\x89PNG")
    body = data[data.index(b"IDAT") + 4 :]
    rows = np.frombuffer(zlib.decompressobj().decompress(body), np.uint8).reshape(shape[0], -1)
    assert (rows[:, 1:].reshape(shape) == pixels).all()
    image = pytest.importorskip("PIL.Image")
    assert (np.asarray(image.open(BytesIO(data))) == pixels).all()


def test_counts_and_shares():
    matrix = confusion_matrix(torch.tensor([0, 0, 1, 2]), [0, 1, 1, 1], 4)
    assert matrix.tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert accuracy(matrix) == 0.5
    first, second, third, nobody = per_class(matrix, ["a", "b", "c", "d"])
    assert (first.precision, first.recall, first.samples) == (1.0, 0.5, 2)
    assert (second.precision, second.recall) == (pytest.approx(1 / 3), 1.0)
    assert (third.f1, nobody.f1, nobody.samples) == (0.0, 0.0, 0)


@pytest.mark.parametrize(("truth", "predicted"), [([0, 1], [0]), ([0, 5], [0, 1]), ([-1], [0])])
def test_numbers_that_are_no_classes_of_the_same_samples(truth, predicted):
    with pytest.raises(DataError) as caught:
        confusion_matrix(truth, predicted, 2)
    assert caught.value.code == "class-numbers"
