"""The site: code in pages runs, every public name is on the reference page, and pages are short."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import shuffled_dpsgd
from reports.browser import BROWSER, SCHEMES, WIDTHS, browse
from shuffled_dpsgd import integrations, make_private, save_checkpoint, testing
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.clipping import BY_TYPE, ClippingEngine
from shuffled_dpsgd.tasks.config_files import parse_config
from shuffled_dpsgd_experiments.sweeps.grid import laid_over
from shuffled_dpsgd_experiments.sweeps.reading import parse_sweep

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TEN_MINUTES = 2400  # words, at 240 a minute
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
OPTIONS = "dataset_size=200, expected_batch_size=50, num_steps=2, noise_multiplier=1.0, delta=1e-3"


def blocks(page: str, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall((DOCS / page).read_text()) if kind == language]


TAKES_LONG = ("accounting.md", "huggingface.md")
CODE = [
    pytest.param(p.name, number, marks=[pytest.mark.slow] if p.name in TAKES_LONG else [])
    for p in sorted(DOCS.glob("*.md"))
    if p.name != "from_opacus.md"  # Two programs at once: tests/examples/test_from_opacus.py.
    for number, code in enumerate(blocks(p.name, "python"))
    # On several ranks: tests/distributed/test_sharded.py.
    if "fully_shard(block" not in code and "parallelize_module(block" not in code
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Commands stand in a fence without a language, or indented, or within a sentence.
SHOWN = re.compile(
    r"^(?:    |torchrun [-\w ]+ -m )?(shuffled[-_]dpsgd .+?)(?: +#.*)?$", re.MULTILINE
)
SAID = re.compile(r"`(?:torchrun [-\w ]+ -m )?(shuffled[-_]dpsgd [^`]+)`")
OPEN = ("…", "...", "CARD SAVED")  # The reader fills in the rest.


def commands_of(text: str) -> tuple[list[str], list[str]]:
    """Commands on lines of their own, to be understood whole, and commands within sentences.

    >>> commands_of("```\\nshuffled-dpsgd plan  # x\\n```\\nSee `shuffled-dpsgd train\\n--resume`.")
    (['shuffled-dpsgd plan'], ['shuffled-dpsgd train --resume'])
    """
    plain = FENCED.sub("", text)
    shown = [code for kind, code in FENCED.findall(text) if kind in ("", "bash")] + [plain]
    joined = re.sub(r"\\\n +", "", "\n".join(shown))
    for name, value in re.findall(r'^(\w+)="(.+)"$', joined, re.MULTILINE):
        joined = joined.replace(f"${name}", value)
    return SHOWN.findall(joined), [" ".join(found.split()) for found in SAID.findall(plain)]


PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
FOUND = [commands_of(page.read_text(encoding="utf-8")) for page in PAGES]
COMMANDS = sorted({line for lines, _ in FOUND for line in lines if not line.endswith(OPEN)})
MENTIONED = sorted({words for _, said in FOUND for words in said})


class Scale(nn.Module):
    """A layer of the reader's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def prepared(page: str) -> dict[str, Any]:
    """What a page's reader has: a model, data, a loss, an optimizer, under the page's names."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    data = torch.utils.data.TensorDataset(torch.randn(200, 16), torch.randint(4, (200,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(model_or_outputs: Any, batch_or_labels: Any) -> Tensor:
        if isinstance(model_or_outputs, Tensor):
            return F.cross_entropy(model_or_outputs, batch_or_labels, reduction="none")
        x, y = batch_or_labels
        return F.cross_entropy(model_or_outputs(x), y, reduction="none")

    names: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "data": data,
        "x": data.tensors[0][:8],
        "y": data.tensors[1][:8],
        "batch": data.tensors[0][:8],
        "layer": nn.Linear(8, 3),
        "Scale": Scale,
        "check_rule": testing.check_rule,
        "per_sample_loss": loss_of,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99),
        "ClippingEngine": ClippingEngine,
        "make_private": make_private,
    }
    if page == "publish.md":
        sizes: dict[str, Any] = eval(f"dict({OPTIONS})")
        names["private"] = make_private(model, optimizer, **sizes)
    if page == "index.md":
        names |= with_transformers()
    if page == "huggingface.md":
        names |= with_trl()
    return names


def with_transformers() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=30, intermediate_size=20, **sizes)
    )
    ids = torch.randint(30, (100, 6))
    records = [{"input_ids": row, "labels": torch.tensor(i % 2)} for i, row in enumerate(ids)]
    return {"model": model, "records": records, "TrainingArguments": transformers.TrainingArguments}


def with_trl() -> dict[str, Any]:
    """Chats, settings, and a tiny Llama under the name that the page has, in this folder."""
    from integrations import tiny_llms

    tiny_llms.llama().save_pretrained("meta-llama/Llama-3.2-1B")
    tiny_llms.tokenizer().save_pretrained("meta-llama/Llama-3.2-1B")
    return {
        "chats": tiny_llms.records("chat"),
        "SFTConfig": lambda _: tiny_llms.trl.SFTConfig(**tiny_llms.settings(Path("out"))),
        "LoraConfig": lambda _: tiny_llms.lora(),
    }


@pytest.mark.parametrize(("page", "number"), CODE, ids=lambda value: str(value))
def test_code_in_pages_runs(
    page: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks(page, "python")[number]
    for written, meant in ((", ...)", f", {OPTIONS})"), ("epochs=10", "epochs=1")):
        code = code.replace(written, meant)
    code = code.replace("expected_batch_size=1000", "expected_batch_size=50")
    compiled = compile(code, f"{page}, block {number}", "exec")
    names = prepared(page)
    try:
        exec(compiled, names)
    finally:
        if "private" in names:
            names["private"].close()
        if BY_TYPE.pop(Scale, None) is not None:
            assert "rules={'scale': 'scale'}" in capsys.readouterr().out


def verb_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and the words after them."""
    found: Any = typer.main.get_command(app)
    while words and hasattr(found, "commands"):
        found = found.commands[words.pop(0)]
    return found, words


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_in_pages_are_understood(command: str) -> None:
    """Verbs, options and their values; nothing is run, and only files of ours must be there."""
    verb, words = verb_of(shlex.split(command)[1:])
    assert all((ROOT / word).is_file() for word in words if word.startswith("sweeps/"))
    assert verb.make_context("", words).params


@pytest.mark.parametrize("command", MENTIONED)
def test_commands_within_sentences_have_verbs_and_flags_that_exist(command: str) -> None:
    verb, words = verb_of(shlex.split(command)[1:])
    flags = {flag for each in verb.params for flag in (*each.opts, *each.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= flags


def test_commands_of_every_kind_of_block_are_seen() -> None:
    assert len(COMMANDS) > 40
    assert len(MENTIONED) > 15
    for start in ("train digits", "audit sensitivity", "examine --epsilon", "sweep sweeps/digits"):
        assert any(command.startswith(f"shuffled-dpsgd {start}") for command in COMMANDS), start


def test_commands_of_benchmarks_have_programs_and_flags_that_exist() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^python (?:-m )?(benchmarks[\w./]+)(.*?)(?: +#.*)?$", page, re.MULTILINE)
    assert len(found) > 5
    for program, words in found:
        path = ROOT / (program.removesuffix(".py").replace(".", "/") + ".py")
        asked = re.findall(r'add_argument\(\s*"(--[\w-]+)"', path.read_text(encoding="utf-8"))
        assert {*re.findall(r"--[\w-]+", words)} <= {*asked}, path


def test_make_targets_in_pages_are_in_the_makefile() -> None:
    pages = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "AGENTS.md"))]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = {*re.findall(r"^make ([\w-]+)", text, re.M), *re.findall(r"`make ([\w-]+)", text)}
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {"demo", "test", "docs", "package"} <= named <= made


@pytest.mark.parametrize(
    ("page", "number", "task"),
    [
        ("data.md", 0, "text-classification"),
        ("generation.md", 0, "causal-lm"),
        ("training_cli.md", 1, "sft"),
    ],
)
def test_settings_in_pages_are_settings(page: str, number: int, task: str) -> None:
    """Those of whole files: index.md and training_cli.md have tests of their own."""
    given = tomllib.loads(re.sub(r"= none\b", '= "none"', blocks(page, "toml")[number]))
    for table in [table for table in given.values() if isinstance(table, dict)]:
        for key in [key for key, value in table.items() if value == "none"]:
            del table[key]
    whole = tomllib.loads(blocks("index.md", "toml")[0])
    merged = {name: {**whole[name], **given.get(name, {})} for name in ("privacy", "training")}
    kept = {"model": {"name": "gpt2-tiny"}, "data": {"format": "e2e", "path": "d"}}
    found = parse_config({**kept, "task": task, **given, **merged})
    assert found.task == task


def test_settings_of_a_sweep_in_the_page_are_settings() -> None:
    raw = tomllib.loads(blocks("sweeps.md", "toml")[0])
    raw["run"] = laid_over(tomllib.loads(blocks("index.md", "toml")[0]), raw["run"])
    found = parse_sweep(raw)
    assert (found.name, len(found.methods)) == ("sst2", len(raw["methods"]))


def test_the_page_about_resuming_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("resume.md", "python")
    steps: list[int] = []

    def stopping(private: Any, folder: str) -> None:
        save_checkpoint(private, folder)
        steps.append(private.steps_taken)
        if steps == [1, 2]:
            raise KeyboardInterrupt

    monkeypatch.setattr(shuffled_dpsgd, "save_checkpoint", stopping)
    first, second = prepared("resume.md"), prepared("resume.md")
    with pytest.raises(KeyboardInterrupt):
        exec(code, first)
    first["private"].close()
    exec(code, second)
    second["private"].close()
    assert steps == [1, 2, 3, 4]
    assert second["private"].released


@pytest.mark.slow
def test_the_landing_page_leads_from_a_csv_to_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of the page, as it stands, on a thousand rows of the file it shows."""
    monkeypatch.chdir(tmp_path)
    (header, *rows) = blocks("index.md", "text")[0].splitlines()
    (tmp_path / "data").mkdir()
    for name, count in (("train", 500), ("dev", 20)):
        lines = [row.replace(",", f" {i},") for i in range(count) for row in rows]
        (tmp_path / "data" / f"{name}.csv").write_text("\n".join([header, *lines]) + "\n")
    (tmp_path / "run.toml").write_text(blocks("index.md", "toml")[0])
    page = (DOCS / "index.md").read_text()
    commands = re.findall(r"^shuffled-dpsgd (.*?)(?: +#.*)?$", page, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["train", "train", "predict", "card"]
    for command in commands:
        words = [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', command)]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{command}: {done.output}"
    assert "kind: proven" in done.output
    assert tomllib.loads((tmp_path / "run.toml").read_text())["privacy"]["epsilon"] == 3.0


def test_the_main_names_are_on_the_reference_page() -> None:
    named = set(re.findall(r"^::: ([\w.]+)$", (DOCS / "reference.md").read_text(), re.MULTILINE))
    public = {f"shuffled_dpsgd.{name}" for name in shuffled_dpsgd.__all__ if name[0] != "_"}
    public |= {f"{integrations.__name__}.{name}" for name in integrations.__all__}
    public |= {testing.__name__, "shuffled_dpsgd.errors"}
    assert public - named == set()


def pages_of(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in pages_of(value)]


def test_no_page_takes_longer_than_ten_minutes() -> None:
    """As they are written, notebooks too; pages made from docstrings are for looking up."""
    pages = [*DOCS.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *ROOT.glob("*.md")]
    words = {page.name: len(page.read_text().split()) for page in pages}
    for path in (ROOT / "examples").rglob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        words[path.name] = len("".join("".join(cell["source"]) + "\n" for cell in cells).split())
    assert max(words.values()) <= TEN_MINUTES, words


def test_figures_show_what_the_code_does() -> None:
    """The shuffle's figures are those of a real shuffle; the step's names files that exist."""
    figures = DOCS / "figures"
    for name, text in runpy.run_path(str(figures / "shuffle.py"))["drawn"]().items():
        assert (figures / name).read_text(encoding="utf-8") == text, name
    step = (figures / "one-step.svg").read_text(encoding="utf-8")
    for path in re.findall(r'class="file">(.+?)<', step):
        assert (ROOT / "src/shuffled_dpsgd" / path).exists(), path


def test_every_page_is_in_the_navigation() -> None:
    pages = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(pages) == len(set(pages))
    assert {page.name for page in DOCS.glob("*.md")} <= set(pages)
    named = re.findall(r"\((\w+)\.html\)", (DOCS / "llms.txt").read_text(encoding="utf-8"))
    assert {f"{name}.md" for name in named} <= set(pages)
    notebooks = {f"tutorials/{path.stem}.md" for path in (ROOT / "examples").rglob("*.ipynb")}
    assert notebooks == {page for page in pages if page.startswith("tutorials/")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


# What a page has asked of a server, and what its search box says, some time after it was opened.
# One request of our own shows that requests are seen.
OURS = "http://127.0.0.1:9/ours.png"
LOOK = (
    f"<img src='{OURS}'>"
    + """<script>addEventListener("load", () => setTimeout(() => {
  const loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
  const found = document.querySelector(".md-search-result__meta").textContent;
  document.body.textContent = JSON.stringify({ loaded, found });
}, 2000));</script></body>"""
)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_search_works_in_a_page_opened_as_a_file(site: Path, tmp_path: Path) -> None:
    page = site / "tutorials" / "looked_at.html"
    page.write_text((page.parent / "audit.html").read_text().replace("</body>", LOOK))
    shown = browse("--dump-dom", f"{page.as_uri()}?q=ledger_path", folder=tmp_path).stdout
    answer = re.search(r"<body[^>]*>(.*?)</body>", shown, re.DOTALL)
    assert answer is not None, shown
    told = json.loads(unescape(answer[1]))
    assert re.fullmatch(r"\d+ matching documents", told["found"]), told
    assert told["loaded"] == [OURS]


# Every page in a frame of every width: how wide it is laid out, its colours, and what it asked for.
TOUR = """<!doctype html><meta name="color-scheme" content="light dark">
<body><iframe id="frame" height="900"></iframe><pre id="found"></pre><script>
(async () => {
  const told = [];
  for (const page of PAGES) for (const width of WIDTHS) {
    frame.width = width;
    await new Promise((go) => { frame.onload = go; frame.src = page; });
    await new Promise((go) => setTimeout(go, 200));
    const inside = frame.contentDocument, view = frame.contentWindow;
    const asked = view.performance.getEntriesByType("resource").map((entry) => entry.name);
    const colour = view.getComputedStyle(inside.body).backgroundColor;
    told.push({ page, width, wide: inside.documentElement.scrollWidth, colour,
      outside: asked.filter((each) => !each.startsWith(location.origin)), asked: asked.length });
  }
  found.textContent = JSON.stringify(told);
})();
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pages_fit_phones_and_desks_and_ask_nothing(
    site: Path, tmp_path: Path, scheme: str
) -> None:
    """Served on this machine. A page that is too wide and asks elsewhere shows that it is seen."""
    broken = f'<body style="width: 2000px"><img src="{OURS}">'
    (site / "broken.html").write_text(broken, encoding="utf-8")
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    pages = [page for page in pages if not page.startswith(("files/", "tutorials/looked"))]
    if scheme == "dark":  # What differs is a matter of colours, which all pages share.
        pages = [page for page in pages if page.startswith(("broken", "index", "r", "tutorials/"))]
    tour = TOUR.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / "tour.html").write_text(tour, encoding="utf-8")
    with served(site) as address:
        budget = "--virtual-time-budget=300000"
        shown = browse(
            "--dump-dom", budget, f"{address}/tour.html", folder=tmp_path, scheme=scheme
        ).stdout
    for made in ("broken.html", "tour.html"):
        (site / made).unlink()
    answer = re.search(r'<pre id="found">(.+?)</pre>', shown, re.DOTALL)
    assert answer is not None, shown
    told = json.loads(unescape(answer[1]))
    assert len(told) == len(pages) * len(WIDTHS)
    ours = [each for each in told if each["page"] == "broken.html"]
    assert all(each["wide"] > each["width"] and each["outside"] == [OURS] for each in ours)
    rest = [each for each in told if each["page"] != "broken.html"]
    assert [each for each in rest if each["wide"] > each["width"]] == []
    assert [each for each in rest if each["outside"] or not each["asked"]] == []
    for each in rest:
        light = sum(map(int, re.findall(r"\d+", each["colour"])[:3])) > 382
        assert light == (scheme == "light"), each


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_colours_follow_the_system_when_a_reader_comes_back(site: Path, tmp_path: Path) -> None:
    found = []
    with served(site) as address:
        for scheme in SCHEMES:
            page = f"{address}/index.html"
            shown = browse("--dump-dom", page, folder=tmp_path, scheme=scheme).stdout
            found += re.findall(r'<body[^>]* data-md-color-scheme="(\w+)"', shown)
    assert found == ["default", "slate"]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of the folder, for as long as one is inside."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_the_site_asks_nothing_of_the_outside(site: Path) -> None:
    pages = [site / "reference.html", *site.glob("api_*.html")]
    reference = "".join(page.read_text(encoding="utf-8") for page in pages)
    for line in (ROOT / "tests/golden/public_names.txt").read_text(encoding="utf-8").split():
        module, _, name = line.rpartition(".")
        # A function may have the name of its module, and then stands below that.
        found = rf'id="{module}\.({name}\.)?{name}"'
        assert name == "__version__" or re.search(found, reference), line
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"(?:https?:)?//[^\"]*\"", text)
        links = re.findall(r"<link [^>]*href=\"(?:https?:)?//[^\"]*\"", text)
        assert [*loaded, *links] == [], page
