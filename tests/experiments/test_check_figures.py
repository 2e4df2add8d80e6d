"""The check of figures on pages: it notices each changed digit, label and unit."""

import dataclasses
import json
import random
import re
from pathlib import Path

import check_figures
import figures
import pytest
from check_figures import RESULTS, ROOT, Page, pages, problems
from file_list import PAGE, check_list

from messages import tells

PAGES = pages()
# What is checked: links that name a figure, and tables whose rows link to results.
LINK = re.compile(r"\[([^\[\]]*)\]\([^)\s]*\.json#[^)\s]*\)")
ROW = re.compile(r"^\|[^|]*\]\([^)|]*\.json[^)]*\)[^|]*\|.*\|$", re.M)
HIDDEN = re.compile(r"^```.*?^```|<!-- files -->.*?<!-- end of files -->", re.M | re.S)


def short(page: Page) -> str:
    return str(page.path.relative_to(ROOT))


def replaced(page: Page, start: int, end: int, new: str) -> Page:
    return dataclasses.replace(page, text=page.text[:start] + new + page.text[end:])


def shown_numbers(text: str) -> list[tuple[int, int]]:
    """Where all figures of a text are, found without the checker's own reading."""
    text = HIDDEN.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    rows = [(row.start() + row[0].index("|", 1), row.end()) for row in ROW.finditer(text)]
    prose = ROW.sub(lambda match: " " * len(match[0]), text)
    spans = [match.span(1) for match in LINK.finditer(prose)]
    return [
        (number.start() + start, number.end() + start)
        for start, end in spans + rows
        for number in re.finditer(r"\d[\d,.]*", text[start:end])
    ]


def sections(page: Page) -> list[Page]:
    """A page's parts between headings, which are sooner checked than all of it."""
    starts = [match.start() for match in re.finditer(r"^#+ ", page.text, re.M)]
    ends = [*starts[1:], len(page.text)]
    return [
        dataclasses.replace(page, text=page.text[a:b]) for a, b in zip(starts, ends, strict=True)
    ]


@pytest.mark.by_default(
    "docs/adapters.md",
    "docs/checkpoints.md",
    "docs/comparison.md",
    "docs/design.md",
    "docs/generation.md",
    "docs/grpo.md",
    "docs/index.md",
    "docs/limits.md",
    "docs/looking.md",
    "docs/models.md",
    "docs/several_gpus.md",
    "docs/what_fits.md",
)
@pytest.mark.parametrize("page", [p for p in PAGES if shown_numbers(p.text)], ids=short)
def test_no_digit_of_a_figure_can_change(page: Page):
    rng = random.Random(0)
    for section in sections(page):
        before = problems(section)  # what is said elsewhere on the page
        for start, end in shown_numbers(section.text):
            position = rng.choice([i for i in range(start, end) if section.text[i].isdecimal()])
            other = rng.choice([d for d in "0123456789" if d != section.text[position]])
            changed = replaced(section, position, position + 1, other)
            line = changed.text[changed.text.rfind("\n", 0, start) + 1 : end]
            assert len(problems(changed)) > len(before), f"{line!r} is not noticed"


def test_the_pages_have_figures():
    counts = {short(page): len(shown_numbers(page.text)) for page in PAGES}
    assert counts["README.md"] > 10 and counts["docs/performance.md"] > 20
    assert counts["experiments/results/README.md"] > 300


def test_no_digit_of_the_list_can_change():
    text = PAGE.read_text(encoding="utf-8")
    assert not check_list(text)
    start, end = (text.index(mark) for mark in ("<!-- files -->", "<!-- end of files -->"))
    for position in random.Random(0).sample(range(start + 15, end), 50):
        changed = text[:position] + ("1" if text[position] != "1" else "2") + text[position + 1 :]
        assert check_list(changed)


@pytest.mark.exhaustive
def test_a_figure_without_its_link_has_no_source():
    for section in (section for page in PAGES for section in sections(page)):
        before = len(problems(section))
        text = HIDDEN.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), section.text)
        for match in LINK.finditer(text):
            looks_measured = re.search(r"\d[.,]\d|\d\s(?:s|GiB|tokens)|%", match[1])
            in_table = text[text.rfind("\n", 0, match.start()) + 1] == "|"
            if looks_measured and not in_table:
                changed = replaced(section, *match.span(), match[1])
                assert len(problems(changed)) > before, match[0]


README, INDEX = "README.md", "docs/index.md"
MEMORY, LONG = "docs/less_memory.md", "docs/long_sequences.md"
SPEED = "docs/performance.md"
DESIGN, FITTING, TABLES = "docs/design.md", "docs/fitting.md", "experiments/results/README.md"
# Two texts of a page change places (<->), or one is replaced by the other (->).
FALSE = [
    (README, "[minimum budget](", "<->", "[auto budget]("),
    (README, "[ZeRO-3 offload](", "<->", "[FSDP2 with `CPUOffloadPolicy`]("),
    (README, "| 11.1 GiB |", "->", "| 11.1 s |"),
    (SPEED, "[121.7 GiB of the GPU and 94.7 GiB", "->", "[121.7 s of the GPU and 94.7 GiB"),
    (MEMORY, "[bf16, int8](", "<->", "[bf16 to nearest, fp32]("),
    (LONG, "[10.06 s in 72.2 GiB]", "->", "[10.06 GiB in 72.2 s]"),
    (LONG, "[ZeRO-3 with tiles (ALST)](", "<->", "[ZeRO-3]("),
    (LONG, "14.68 s in 43.1", "->", "14.68 tokens/s in 43.1"),
    (LONG, "[all layers](", "<->", "[two layers]("),
    (LONG, "| s/step | predicted |", "->", "| predicted | s/step |"),
    (README, "[auto budget](", "->", "[60 GiB budget]("),
    (README, "| 11.1 GiB |", "->", "| 11.1 GB |"),
    (
        SPEED,
        "121.7 GiB of the GPU and 94.7 GiB of the",
        "->",
        "121.7 GiB of the host and 94.7 GiB of the",
    ),
    (
        MEMORY,
        "[bf16 masters, fp32 state, minimum budget](",
        "<->",
        "[bf16 masters and state, minimum budget](",
    ),
    (MEMORY, "[bf16, int8 but the", "->", "[bf16, int8, the embedding's too: compact, not the"),
    (TABLES, "[masters in bfloat16, state in fp32, ", "<->", "[masters and state in bfloat16, "),
    (TABLES, "[13 layers, parts of up to 8 GiB](", "<->", "[parts of one group]("),
    (DESIGN, "[35 s]", "->", "[42 s]"),
    (FITTING, "[0.937 s]", "->", "[0.973 s]"),
    (FITTING, "[1.592 s/step]", "->", "[1.592 minutes]"),
]
# A word in the sentences around a figure, which are found by its link.
NEAR = [
    (README, "85-layers-8192-tokens.json#num_parameters", "H100", "H200"),
    (INDEX, "clip-1-least.json#of_zero_3", "DeepSpeed's", "FSDP2's"),
    (INDEX, "clip-1-least.json#of_zero_3", "DeepSpeed's ZeRO-3", "RoundPipe"),
    (MEMORY, "compact_quality.json#num_parameters", "H200", "H100"),
    (MEMORY, "clip-1-least-compact.json#num_parameters", "H200", "RTX 4090"),
    (
        MEMORY,
        "large_peers/megatrain-jax-compact.json#num_parameters",
        "DeepSpeed 0.19.8",
        "FSDP2 0.19.8",
    ),
    (LONG, "524288-megatrain_jax.json#of_zero_3_tiled", "throughput", "memory"),
    (LONG, "two layers](", "H200", "A100"),
]


def as_written(text: str, words: str) -> str:
    """The place of words in a text, with the text's own line breaks."""
    found = re.search(r"\s+".join(map(re.escape, words.split(" "))), text)
    assert found, f"{words!r} is not on the page"
    return found[0]


@pytest.mark.by_default(
    "README.md-[minimum budget](-<->-[auto budget](",
    "README.md-[ZeRO-3 offload](-<->-[FSDP2 with `CPUOffloadPolicy`](",
    "README.md-| 11.1 GiB |-->-| 11.1 s |",
    "docs/long_sequences.md-[10.06 s in 72.2 GiB]-->-[10.06 GiB in 72.2 s]",
    "docs/long_sequences.md-[ZeRO-3 with tiles (ALST)](-<->-[ZeRO-3](",
    "docs/long_sequences.md-14.68 s in 43.1-->-14.68 tokens/s in 43.1",
    "docs/long_sequences.md-[all layers](-<->-[two layers](",
    "docs/long_sequences.md-| s/step | predicted |-->-| predicted | s/step |",
    "README.md-[auto budget](-->-[60 GiB budget](",
    "README.md-| 11.1 GiB |-->-| 11.1 GB |",
    "docs/design.md-[35 s]-->-[42 s]",
)
@pytest.mark.parametrize(("name", "one", "how", "other"), FALSE)
def test_swapped_labels_cards_and_units_are_noticed(name, one, how, other):
    (page,) = (page for page in PAGES if short(page) == name)
    one = as_written(page.text, one)
    if how == "<->":
        assert other in page.text
        text = page.text.replace(one, "\0", 1).replace(other, one, 1).replace("\0", other, 1)
    else:
        text = page.text.replace(one, other, 1)
    assert not problems(page) and problems(dataclasses.replace(page, text=text))


@pytest.mark.parametrize(("name", "link", "word", "other"), NEAR)
def test_other_cards_and_libraries_around_a_figure_are_noticed(name, link, word, other):
    (page,) = (page for page in PAGES if short(page) == name)
    place = page.text.index(link)
    words = re.finditer(r"\s+".join(map(re.escape, word.split())), page.text)
    start, end = min((m.span() for m in words), key=lambda span: abs(span[0] - place))
    assert not problems(page) and problems(replaced(page, start, end, other))


# ---- made-up results


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results, in place of the repository's."""
    monkeypatch.setattr(check_figures, "ROOT", tmp_path)
    monkeypatch.setattr(check_figures, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    figures.read.cache_clear()
    return tmp_path / "results"


def write(folder: Path, name: str, **changes):
    result = {
        "mean_seconds_per_step": 2.0,
        "stdev_seconds_per_step": 0.125,
        "num_measured_steps": 8,
        "tokens_per_step": 64_000,
        "hardware": {"device": "NVIDIA H200", "device_fraction": "0.85"},
        "record": {"run": "a", "clean": True},
    }
    result |= changes
    (folder / f"{name}.json").write_text(json.dumps({k: v for k, v in result.items() if v}))


def wrong(folder: Path, text: str) -> str:
    return "\n".join(problems(Page(path=folder.parent / "page.md", text=text)))


TABLE = """
| | s/step | ± | tokens/s | of resident |
|---|---|---|---|---|
| [one](results/one.json) | 2.000 | 0.125 | 32,000 | 1.000 |
| [two](results/two.json){mark} | 1.600 | 0.125 | 40,000 | 1.250 |
"""


def test_rows_of_one_run_need_no_mark(results):
    write(results, "one")
    write(results, "two", mean_seconds_per_step=1.6)
    assert not wrong(results, TABLE.format(mark=""))


@pytest.mark.parametrize(
    ("changes", "mark"),
    [
        ({"record": {"run": "b", "clean": True}}, "another run"),
        ({"record": {"run": "a", "host": "another", "clean": True}}, "another run"),
        ({"record": {"run": "a", "clean": False}}, "no commit's tree"),
        ({"hardware": {"device_fraction": "0.9"}}, "90% of the GPU"),
        ({"record": None}, "another run, before the protocol"),
        (
            {"record": None, "update_mode": "deferred"},
            "another run, before the protocol, owes an update",
        ),
    ],
)
def test_rows_that_differ_say_so(results, changes, mark):
    write(results, "one")
    write(results, "two", mean_seconds_per_step=1.6, **changes)
    early = changes.get("record", "") is None
    text = TABLE.format(mark=f" ({mark})")
    if early:
        text = text.replace("1.600 | 0.125", "1.600 | –")
    assert not wrong(results, text)
    for part in mark.split(", "):
        assert wrong(results, text.replace(part, ""))
    assert mark.split(", ")[0] in wrong(results, text.replace(f" ({mark})", ""))


def test_early_rows_of_other_folders_are_other_runs(results):
    (results / "later").mkdir()
    write(results, "one", record=None, versions={"commit": "x"})
    write(results / "later", "two", record=None, versions={"commit": "x"})
    text = "Before the protocol.\n\n| | s/step |\n|---|---|\n"
    text += "| [one](results/one.json) | 2.000 |\n| [two](results/later/two.json){} | 2.000 |\n"
    assert not wrong(results, text.format(" (another run)"))
    assert "another run" in wrong(results, text.format(""))
    assert wrong(results, text.format(" (another run)").replace("Before", "After"))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("| | s/step |\n|---|---|\n| mine | 2.000 |\n", "has no source"),
        ("| | colour |\n|---|---|\n| [one](results/one.json) | 2.000 |\n", "names no figure"),
        ("| | s/step |\n|---|---|\n| [one](results/none.json) | 2.000 |\n", "none.json"),
        ("a step takes 2.0 s", "'2.0 s' has no source"),
        ("it reaches 32,000 of them", "'32,000' has no source"),
        ("[2.0 s](results/one.json)", "names no figure"),
        ("[2.0 s](results/one.json#nonsense)", "no 'nonsense'"),
        ("[2.0 s](results/none.json#seconds_per_step)", "none.json"),
        ("[2.0 s and 3 s](results/one.json#seconds_per_step)", "shows 2 numbers of 1"),
        ("[a step](results/one.json#seconds_per_step)", "shows 0 numbers of 1"),
        ("<!-- given: 9 GiB -->", "nowhere said"),
        ("| | s/step |\n|---|---|\n| [ours](results/one.json) | 2.000 |\n", "has no word of its"),
        (
            "| | s/step |\n|---|---|\n| [one, early](results/one.json) | 2.000 |\n"
            "| [one, late](results/one.json) | 2.000 |\n",
            "could have each other's label",
        ),
        ("## H100\n[2.0 s](results/one.json#seconds_per_step)", "not of the H100"),
        ("[1.9 s](results/one.json#seconds_per_step)", "'1.9' is 2.0"),
        ("[2.1 s](page.md#timing)\n\n# Timing\n[2.0 s](results/one.json#seconds_per_step)", "2.1"),
    ],
)
def test_what_is_wrong_is_said(results, text, what):
    write(results, "one")
    (results.parent / "page.md").write_text(text)
    assert what in wrong(results, text)


@pytest.mark.parametrize(
    "text",
    [
        "[2.0 s](results/one.json#seconds_per_step), [2000 ms](results/one.json#seconds_per_step)",
        "[32,000 tokens/s, ± 0.13 s](results/one.json#tokens_per_second,spread)",
        "[0.032 million tokens a second](results/one.json#tokens_per_second)",
        "a GPU of 9 GiB <!-- given: 9 GiB -->",
        "`1.5 s` and\n```text\n1.5 s\n```\nas the code prints: 1.5 s",
        "DeepSpeed 0.19.8 ZeRO-3 on Qwen2.5-3B, 4 microbatches",
        "[2.0 s](page.md#timing)\n\n# Timing\n[2.0 s](results/one.json#seconds_per_step)",
        "| row | what |\n|---|---|\n| a | 7 |\n",
    ],
)
def test_what_is_right_is_not_refused(results, text):
    write(results, "one")
    (results.parent / "page.md").write_text(text)
    check_figures._section.cache_clear()
    assert not wrong(results, text)


def test_few_steps_are_no_mean(results):
    write(results, "one", num_measured_steps=7)
    text = "| | s/step |\n|---|---|\n| [one](results/one.json) | 2.000 |\n"
    assert tells(wrong(results, text), 7)


def test_a_mean_is_not_the_early_files_median():
    """The largest model's steps were 9.33, 3.14 and 0.08 s."""
    path = RESULTS / "h200/large/32-layers-auto.json"
    result = figures.read(path)
    assert result["seconds_per_step"] == sorted(result["seconds_of_steps"])[1]
    assert figures.figure(path, "seconds_per_step") == pytest.approx(4.1817, abs=1e-4)
    assert figures.figure(path, "tokens_per_second") == pytest.approx(7836, abs=1)
    assert figures.figure(path, "prediction_error") == pytest.approx(-0.191, abs=1e-3)
