"""The quickstart's report: a page that stands alone, its charts and its tables."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline_lens.tune.charts import line_chart

QUICKSTART = Path(__file__).parents[5] / "examples" / "quickstart"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(QUICKSTART)
    from report import Picture, Report, accuracy, confusion_matrix, per_class, png_uri


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
    assert not re.search(r'(src|href)="(?!data:)|url\(|<script src|@import', page)
    assert "Cats &amp; &lt;dogs&gt;" in page and "a &lt; b" in page
    assert page.count('class="wrong"') == 1 and "is cat" in page


def test_a_page_is_readable_on_a_phone():
    page = whole().html()
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert all("viewBox" in tag for tag in re.findall("<svg[^>]*>", page))
    assert "pre { font" in page and "white-space: pre-wrap" in page


def lines_of(chart):
    return json.loads(re.search("<script type=.application/json.>(.*)</script>", chart)[1])


def test_a_line_with_a_gap_and_the_last_value_in_its_legend():
    chart = line_chart({"loss": [(1, 0.9), (2, math.nan), (3, 0.4)], "late": [(3, 1), (2, 2)]}, "epoch", ".2f")
    assert "<b>0.40</b>" in chart and "<em>epoch</em>" in chart
    lines = lines_of(chart)
    assert lines["tables"] == [[[1, 2, 3], [0.9, None, 0.4]], [[2, 3], [2, 1]]]
    assert (lines["names"], lines["form"], lines["label"]) == (["loss", "late"], ".2f", "epoch")


@pytest.mark.parametrize("points", [[], [(1, math.nan)], [(math.inf, 1)]])
def test_a_chart_without_points_says_so(points):
    assert line_chart({"loss": points}) == '<p class="none">no points yet</p>'


def test_a_name_ends_no_script():
    chart = line_chart({"</script><b>": [(1, 0.5)]})
    assert chart.count("</script>") == 1 and lines_of(chart)["names"] == ["</script><b>"]


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
    with pytest.raises(ValueError, match="predicted classes of the same samples"):
        confusion_matrix(truth, predicted, 2)
