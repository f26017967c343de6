"""Figures of the page: the numbers in them, and SVG that lives in a page of two themes."""

import dataclasses
import re
import xml.etree.ElementTree

import numpy as np
import pytest

from s3ac_jax.report import page_figures
from s3ac_jax.report.page_curves import curve_cards, overlaid_cards, run_colours
from s3ac_jax.report.page_data import columns, read_runs
from s3ac_jax.report.page_svg import BLUE, css_colour, inline, panels, scale_colour, themed
from tests.page_runs import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_runs([write_run(tmp_path_factory.mktemp("run"))])[0]


def test_wilsons_interval():
    # Table of R's binom.confint(8, 10, methods="wilson").
    assert page_figures._wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-4)
    assert page_figures._wilson(0, 10)[0] == pytest.approx(0.0, abs=1e-12)


def test_coverage_counts_every_response_alike(run):
    edges, mixed = page_figures._mixture(run)
    assert edges == [0, 5, 10]
    assert mixed.tolist() == [[14, 6], [6, 3]]
    line = {"stage": "online", "coverage/share_0_5": 0.9, "coverage/accuracy_0_5": 1.0}
    sparse = line | {"coverage/share_0_5": 0.1, "coverage/accuracy_0_5": 0.0}
    empty = line | {"coverage/share_0_5": 0.0, "coverage/accuracy_0_5": None}
    three = [one | {"tick": tick} for tick, one in enumerate((line, sparse, empty))]
    few = dataclasses.replace(run, metrics=three)
    shares, accuracies = page_figures._by_bucket(few, ["0_5"], (0, 2))
    assert shares == pytest.approx([1 / 3])
    assert accuracies == pytest.approx([0.9])


def test_middling_prompts_by_the_critic(run):
    ticks, shares = page_figures._promised_middling(columns(run))
    assert list(ticks) == list(range(10))
    # V = 0.9, 0.5, 0.4, 0.3, -0.5, -0.9: promises 0.95, 0.75, 0.7, 0.65, 0.25, 0.05.
    assert shares == pytest.approx([4 / 6] * 10)


def test_an_older_run_has_no_mixture(run):
    for pretraining in ({}, {"coverage": None}, {"coverage": {"edges": [0]}}):
        old = dataclasses.replace(run, pretraining=pretraining)
        assert page_figures._mixture(old)[1].size == 0


def test_every_card_is_well_formed_and_themed(run):
    with themed():
        cards = page_figures.method_cards(run, "x") + curve_cards(run, "x")
        cards += overlaid_cards([run, run], "x")
    drawn = [card for card in cards if card.svg]
    assert {card.title for card in cards if not card.svg} == {
        "Truncated", "Value loss", "Gradient norm, critic", "Gradient norm, actor",
        "What clips cut", "Sampler against trainer", "Memory",
    }  # fmt: skip
    for card in drawn:
        for svg in re.findall(r"<svg.*?</svg>", card.svg, re.DOTALL):
            root = xml.etree.ElementTree.fromstring(svg)
            assert root.get("aria-label")
            assert "var(--" in svg
            # No colour that a theme can't change, no text in another font.
            assert not re.search(r"#[0-9a-f]{6}\b", svg)
            assert "DejaVu" not in svg


def test_trips_are_marked(run):
    healthy = dataclasses.replace(run, tripwires=[])
    with themed():
        marked, unmarked = (curve_cards(one, "x")[1].svg for one in (run, healthy))
    assert marked.count("var(--pink)") == unmarked.count("var(--pink)") + 1


def test_a_thousand_ticks_stay_small(run):
    long = [{"stage": "online", "tick": n, "reward": float(np.sin(n))} for n in range(20_000)]
    with themed():
        card = curve_cards(dataclasses.replace(run, metrics=long), "x")[1]
    assert card.title == "Reward"
    assert len(card.svg) < 40_000


def test_names_are_text_not_mathematics():
    with themed():
        figure, [axes] = panels(1, 200, 100)
        axes.set_title('$<b>\\frac & "x"')
        svg = inline(figure, '"><script>', "p")
    assert '$&lt;b&gt;\\frac &amp; "x"' in svg
    assert 'aria-label="&quot;&gt;&lt;script&gt;"' in svg


def test_colours():
    assert css_colour(f"{BLUE} {scale_colour(0)} {scale_colour(1)}") == (
        "var(--blue) color-mix(in oklab, var(--scale-high) 00%, var(--scale-low)) "
        "color-mix(in oklab, var(--scale-high) 99%, var(--scale-low))"
    )
    assert all(len(set(run_colours(n))) == n for n in (1, 6, 7, 20))
