"""Figures on pages about claims and audits, and in the README, are those of committed results.

Each check rebuilds a sentence, or a row of a table, from the JSON and looks for it on the page.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from shuffled_dpsgd.tasks import load_config, parse_config
from shuffled_dpsgd_experiments.reproductions import REPRODUCTIONS

ROOT = Path(__file__).parents[2]
CLAIMS, AUDITING, README = "docs/claims.md", "docs/auditing.md", "README.md"
ERRATA = "docs/errata.md"
ACCOUNTING = "docs/accounting.md"


def result(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def page(name: str) -> str:
    return words((ROOT / name).read_text(encoding="utf-8"))


def bound(audit: Any, adversary: str, canary: str | None = None) -> dict[str, float]:
    """Bounds by method of one attack, each at its own confidence; `closed` where there is one."""
    for attack in audit["attacks"]:
        if attack["adversary"] == adversary and canary in (None, attack["canary"]):
            bounds = {name: found["epsilon"] for name, found in attack["bounds"].items()}
            return bounds | {"closed": (attack.get("closed_form") or {}).get("epsilon")}
    raise KeyError(adversary)


def verdict(audit: Any, kind: str) -> Any:
    return next(found for found in audit["verdicts"] if found["claim"]["kind"] == kind)


ADJACENCIES = ("add-remove", "replace-one")
STEP_ROWS = {
    "axis sum (constant along the axis)": ("axis sum", "constant-on-axis"),
    "un-permuted tensor (random direction)": ("un-permuted tensor", "random-direction"),
    "re-alignment against W_t (random direction)": ("re-alignment against W_t", None),
    "orbit maximum (Dirac, axis of 3072)": ("orbit maximum", "dirac"),
    "orbit likelihood ratio (Dirac)": ("orbit likelihood ratio", "dirac"),
    "fixed index (Dirac), the paper's": ("fixed index", "dirac"),
}


@pytest.mark.parametrize("row", STEP_ROWS)
def test_the_table_of_one_step(row: str) -> None:
    found = bound(result("audit_step_vit_paper"), *STEP_ROWS[row])
    gaussian = found["order-statistics-gaussian"]
    digits = 2 if gaussian < 10.0 else 1
    closed = "" if found["closed"] is None else f"**{found['closed']:.1f}** "
    last = (
        f"| {closed}| {found['order-statistics']:.2f} | {found['clopper-pearson']:.2f} "
        f"| {gaussian:.{digits}f} |"
    )
    assert f"| {row} {last}" in page(AUDITING), last


def test_samples_cap_bounds() -> None:
    few, many = result("audit_step_vit_paper"), result("audit_step_vit_paper_40000")
    caps = re.search(r"exceeds ([\d.]+) \(Clopper–Pearson\) or ([\d.]+)", few["notes"][0])
    assert caps is not None
    (pearson, ranks), sums, text = caps.groups(), bound(many, "axis sum"), page(CLAIMS)
    assert f"Clopper–Pearson cannot exceed {pearson}" in text
    assert f"order statistics {ranks}" in text
    assert f"gives {sums['clopper-pearson']:.2f} and {sums['order-statistics']:.2f}" in text
    own = bound(few, "axis sum")
    few_words = f"5000 give {own['clopper-pearson']:.2f} and {own['order-statistics']:.2f}"
    assert few_words in page(CLAIMS)
    settings = [{**audit["setting"], "num_observations": 0} for audit in (few, many)]
    assert settings[0] == settings[1], "nothing but the sample may differ"


def test_the_readme_quotes_the_step() -> None:
    audit = result("audit_step_vit_paper")
    claimed = verdict(audit, "heuristic")["claim"]["epsilon"]
    shown = bound(audit, "axis sum", None)["order-statistics"]
    assert f"the paper claims {claimed:.3g}, an attack shows at least {shown:.2f}" in page(README)


def test_whole_runs_in_isolation() -> None:
    paper, certified = (result(f"audit_composition_vit_{kind}") for kind in ("paper", "certified"))
    text = page(AUDITING)
    assert f"the audit gives ε ≥ {verdict(paper, 'heuristic')['strongest_bound']:.1f}" in text
    assert f"certified ε is {verdict(paper, 'proven')['claim']['epsilon']:.0f} (proven)" in text
    assert f"certified for ε = {verdict(certified, 'proven')['claim']['epsilon']:.3f}" in text
    runs = certified["setting"]["num_observations"]
    assert f"{runs:,} + {runs:,} runs give" in text
    assert f"ε ≥ {verdict(certified, 'proven')['strongest_bound']:.2f} (measured)" in text


def test_the_digits() -> None:
    text = page(AUDITING)
    certified, paper, step = (
        result(f"audit_run_digits_{kind}") for kind in ("certified", "paper", "paper_step")
    )
    for audit in (certified, paper):
        assert "recovered 100.0%" in audit["notes"][0]
    judged = verdict(certified, "proven")
    assert judged["strongest_attack"].startswith("noise of every step")
    steps = bound(certified, "noise of every step")["order-statistics-gaussian"]
    coins = max(
        found["epsilon"]
        for attack in certified["attacks"]
        for found in attack["joint_bounds"].values()
        if found["may_refute"] == "any claim"
    )
    shown = f"shows ε ≥ {steps:.2f} by the noise of every step ({judged['strongest_bound']:.2f} at"
    assert f"{shown} the joint 95 %; measured), and {coins:.2f} by coins alone" in text
    members = certified["membership"]
    areas = [members[kind]["area"] for kind in ("with_privacy", "without_privacy")]
    ends = [f"{members[kind][end]:.2f}" for kind in ("with_privacy", "without_privacy")
            for end in ("low", "high")]  # fmt: skip
    assert (
        f"{areas[0]:.2f} ({ends[0]} to {ends[1]}) with privacy, "
        f"{areas[1]:.2f} ({ends[2]} to {ends[3]}) without" in text
    )
    assert verdict(paper, "heuristic")["strongest_bound"] == 0.0
    judged = verdict(step, "heuristic")
    assert judged["outcome"].startswith("refuted")
    against = f"({judged['strongest_bound']:.1f} against {judged['claim']['epsilon']:.3f}, measured"
    assert against in text
    record = next(a for a in step["attacks"] if a["canary"] == "mislabelled record")
    strongest = max(
        found["epsilon"]
        for found in record["joint_bounds"].values()
        if found["may_refute"] == "any claim"
    )
    assert f"a mislabelled record alone shows {strongest:.1f})" in text


def test_table_six_and_its_control() -> None:
    rows, text = result("audit_paper_table6")["rows"], page(AUDITING)

    def cells(label: str, shown: list[str]) -> str:
        return f"| {label} | {' | '.join(shown)} |"

    def spread(key: str) -> list[str]:
        both = [row["readings"]["strict"][key] for row in rows]
        return [f"{low:.2f} – {high:.2f}" for low, _, high in both]

    for row in rows:
        literal = row["readings"]["literal"]
        assert min(literal["share_infinite"], literal["share_infinite_on_pure_noise"]) > 0.5
    assert "it prints infinity in most runs, on pure noise as well" in text
    printed = [f"{row['printed_in_the_paper']:.4f}" for row in rows]
    strongest = [
        f"{max(row[name]['epsilon'] for name in ('clopper_pearson', 'order_statistics')):.2f}"
        for row in rows
    ]
    repetitions = result("audit_paper_table6")["setting"]["repetitions"]
    own = f"its estimator on this mechanism, strict, 5 to 95 % of {repetitions} repetitions"
    for expected in (
        cells("audited ε printed in the paper", printed),
        cells(own, spread("quantiles")),
        cells("the same on pure noise", spread("quantiles_on_pure_noise")),
        cells("Clopper–Pearson and order statistics at 95 % (measured)", strongest),
    ):
        assert expected in text
    median = rows[0]["readings"]["strict"]["quantiles_on_pure_noise"][1]
    assert f"whose median is {median:.2f}" in text


def test_one_run_beside_jax_privacy() -> None:
    (point,) = result("audit_comparison_one_run")["points"]
    assert point["mu"] == 1.0
    mean = {name: f"{value:.2f}" for name, value in point["mean"].items()}
    assert f"{point['canaries']} canaries in one step" in page(AUDITING)
    assert f"where the truth is {point['true_epsilon']:.2f}" in page(AUDITING)
    rows = (
        ("coins alone", mean["ours, coins alone"], mean["theirs, coins alone"]),
        (
            "guesses against a Gaussian curve",
            "–",
            mean["theirs, guesses against a Gaussian curve"],
        ),
        (
            "independent Gaussian scores",
            mean["ours, independent Gaussian scores"],
            mean["theirs, independent Gaussian scores"],
        ),
    )
    for row in rows:
        assert f"| {' | '.join(row)} |".replace("| –", "|") in page(AUDITING)
    ours = point["mean"]["ours, independent Gaussian scores"]
    assert ours > 1.5 * point["mean"]["theirs, guesses against a Gaussian curve"]


def test_how_often_ours_is_at_least_theirs() -> None:
    points = result("audit_comparison")["points"]
    wins = sum(p["data_sets_where_ours_is_at_least_their_best"] for p in points)
    gaussian = sum(p["data_sets_where_our_gaussian_is_at_least_theirs"] for p in points)
    text = page(AUDITING)
    assert f"at least theirs on {wins} of {20 * len(points)} data sets" in text
    assert f"Our Gaussian bound is at least theirs on {gaussian}." in text
    for point in points:
        assert point["mean_of_ours"] >= point["mean_of_their_best_on_each_data_set"]
        ours, theirs = point["ours"]["order-statistics-gaussian"], point["theirs"]["gdp"]
        assert sum(ours) >= sum(theirs)


def test_coverage() -> None:
    found, text = result("audit_coverage")["estimators"], page(AUDITING)

    def worst(name: str) -> str:
        return f"{100 * max(row['above_the_truth'] for row in found[name].values()):.1f} %"

    assert (
        f"{worst('order-statistics')} for order statistics, {worst('clopper-pearson')} for "
        f"Clopper–Pearson, {worst('one-run-fdp')} for one-run-fdp, "
        f"{worst('order-statistics-gaussian')} for order statistics over Gaussian curves "
        f"(1000 repetitions leave ± 1.4 points), "
        f"{worst('order-statistics-gaussian, over a run')} over a run of them, and "
        f"{worst('order-statistics-gaussian, real runs')} for real runs" in text
    )
    assert len(found["order-statistics"]) == 11


def test_planted_bugs_are_all_caught() -> None:
    found = result("audit_planted_bugs")
    assert all(bug["caught_by"] for bug in found["bugs"].values())
    assert len(found["bugs"]) == 20
    assert "Twenty known DP-SGD mistakes" in page(AUDITING)
    planted = [row for name, row in found["special"].items() if "sound" not in name]
    assert all(row["refuted"] for row in planted)
    assert len(planted) == 5
    assert not any(row["refuted"] for row in found["special"].values() if row not in planted)
    assert "Five mistakes in units, largest batches and banded noise" in page(AUDITING)


def test_the_knock_out_on_the_digits() -> None:
    found, text = result("audit_black_box"), page(CLAIMS)
    areas = {
        arm: " and ".join(f"{found['arms'][arm][a]['pooled_area']:.3f}" for a in ("loss", "ratio"))
        for arm in ("off", "on")
    }
    assert f"without the shuffle {areas['off']}, with it {areas['on']}" in text
    gaps = []
    for attack in ("loss", "ratio"):
        gap = found["on_minus_off"][attack]
        gaps.append(f"{gap['mean_difference']:.3f} ± {(gap['high'] - gap['low']) / 2:.3f}")
    assert f"with minus without {gaps[0]} and {gaps[1]} (measured" in text
    assert found["largest_paired_difference"] < 3e-5
    assert "by more than 3e-5" in text


@pytest.mark.parametrize("batch_clip", [1.0, 10.0, 100.0])
def test_claimed_and_true_delta(batch_clip: float) -> None:
    row = next(
        row
        for row in result("claims")["claimed_and_true_delta"]
        if row["batch_clip"] == batch_clip and row["pair"] == "spike"
    )
    first, second = (f"{t['delta']:.3f} ± {(t['high'] - t['low']) / 2:.3f}" for t in row["truth"])
    name = "c' = c" if batch_clip == 1.0 else f"c' = {batch_clip:.0f}c"
    start = f"| {name} | {row['noise_multiplier']:.3f} | {first}"
    found = re.search(
        re.escape(start) + r"[^|]*" + re.escape(second) + r"[^|]*\| ([^|]+) \|", page(CLAIMS)
    )
    assert found is not None, start
    stated = found[1].replace(" million", "e6").replace(",", "").replace(" ", "")
    assert float(stated) == pytest.approx(row["true_over_claimed_at_least"], rel=0.03)


def test_groups_constants_and_remarks() -> None:
    found, text = result("claims"), page(CLAIMS)
    groups = found["group_against_dimension"]
    assert f"10^{int(groups['log10_of_d_factorial']):,} of them" in text
    for scope in ("paper", "full"):
        assert f"10^{int(groups[scope]['log10_permutations']):,}" in text
    constant = next(row for row in found["claimed_and_true_delta"] if row["pair"] == "constant")
    assert f"the whole Gaussian δ remains: {constant['truth'][0]['delta']:.3f}" in text
    shares = found["shuffled_over_unshuffled_at_0.25"].values()
    fitting = sorted(100 * s["100"] for s in shares if s["100"] < 0.1)
    assert f"({fitting[0]:.1f} to {fitting[-1]:.1f} %)" in text
    smallest = sorted(100 * s["1"] for s in shares)
    assert f"at c' = c it is {smallest[0]:.1f} to {smallest[-1]:.1f} %" in text


def test_ordinary_records_on_fixed_points() -> None:
    found, text = result("claims")["gradients_on_fixed_points"], page("docs/attained.md")
    paper, full = (
        (
            f"{found[scope]['median']:.2f}",
            f"({found[scope]['least']:.2f} to {found[scope]['most']:.2f})",
        )
        for scope in ("paper", "full")
    )
    stated = f"it is {paper[0]} of the norm in the median of {found['records']} ordinary records"
    assert f"{stated} {paper[1]} in scope `paper`" in text
    assert f"and {full[0]} {full[1]} in scope `full`" in text


def test_where_the_gain_comes_from() -> None:
    strong, weak = result("claims")["where_the_gain_comes_from"]
    text = page(CLAIMS)
    unshuffled = "unshuffled_by_advanced_composition"
    assert f"σ0 = {weak[unshuffled]:.2f} (ε = 1) and {strong[unshuffled]:.1f} (ε = 0.1)" in text
    assert f"asks for {weak['certified']:.2f} and {strong['certified']:.1f}" in text
    whole, accountant, theorem = (
        f"{weak[key]:.{digits}f}×"
        for key, digits in (
            ("whole_factor", 0),
            ("factor_of_the_accountant", 1),
            ("factor_of_the_theorem", 1),
        )
    )
    assert f"of the {whole} between" in text
    assert f"{accountant} is the distance" in text
    assert f"{theorem} is the invalid theorem" in text
    assert f"of the {strong['whole_factor']:.0f}× at ε = 0.1" in text
    assert f"and {strong['factor_of_the_theorem']:.0f}×" in text


def test_fenton_wilkinson() -> None:
    found, text = result("claims")["fenton_wilkinson_distance"], page(ERRATA)
    assert f"Fenton–Wilkinson is off by {found['log-standard deviation 4']:.2f}" in text
    assert f"by {result('fig2')['kolmogorov']['kernel-density']:.2f})" in text
    assert f"they have 0.25: off by {found['log-standard deviation 0.25']:.3f}" in text


def test_how_close_the_accountants_are() -> None:
    found, text = result("claims")["against_the_truth"], page(ACCOUNTING)
    certified, others = found["certified"], found["rdp"]
    assert certified["least"] >= 1.0
    assert f"Over its {found['settings']} settings" in text
    median = f"{certified['median'] - 1.0:.0e}".replace("e-0", "e-")
    worst = f"{certified['most'] - 1.0:.0e}".replace("e-0", "e-")
    assert found["at 1e-8"]["most"] < 1.0 + 1e-4
    assert (
        f"above it by {median} in the median, by less than 1e-4 where δ ≥ 1e-8, and by {worst} at "
        "worst" in text
    )
    assert (
        f"Rényi DP is proven and looser: by {100 * (others['least'] - 1.0):.0f} % to "
        f"{others['most']:.0f}-fold over the settings of `tests/core`, "
        f"{100 * (others['median'] - 1.0):.0f} % in the median" in text
    )
    assert 1 / 55 < found["gdp"]["least"] < 1 / 45
    assert "between a fiftieth of ε and" in text
    assert found["gdp"]["most"] > 1e6
    assert "absurdly more" in text


def test_what_epsilon_means_to_people() -> None:
    found, text = result("claims")["what_epsilon_means"], page(ACCOUNTING)
    vit, sst2 = found["vit"], found["sst2"]
    one, other = (vit["epsilon_by_adjacency"][name]["epsilon"] for name in ADJACENCIES)
    assert (
        f"σ = {vit['noise_multiplier']:.3f} in the running example is ε = {one:.2f} if a record "
        f"is added or removed, {other:.2f} if it is replaced" in text
    )
    rates = [each["true_positive_rate"] for each in vit["attacker"]["true_positive_rates"]]
    assert (
        f"at most {vit['attacker']['advantage']:.3f}, true positives at most {100 * rates[0]:.1f} "
        f"% at 1 % false positives and {100 * rates[1]:.2f} % at 0.1 %" in text
    )
    people = [each["epsilon"] for each in sst2["epsilon_by_records"]]
    assert f"{people[0]:.2f}, {people[1]:.2f} and {people[2]:.1f} for people with 2, 4" in text
    ten, best = sst2["ten_runs"]["epsilon"], sst2["best_of_ten"]["epsilon"]
    assert f"then costs {best:.2f}, where publishing ten runs costs {ten:.2f} (proven" in text


def test_traps_and_what_the_shuffle_hides() -> None:
    found, text = result("claims"), page(CLAIMS)
    traps, chi = found["traps"], found["chi_square"]
    assert f"where the best order is {traps['best_renyi_order_at_0.1']:.0f}" in text
    assert (
        f"gives σ = {traps['gdp_noise_at_1']:.2f} for ε = 1 where "
        f"{traps['certified_noise_at_1']:.3f} is needed. With its noise the certified ε is "
        f"{traps['certified_epsilon_at_gdp_noise']:.2f} (proven). For σ below "
        f"{traps['gdp_is_too_large_below']:.2f} it errs the other way" in text
    )
    assert (
        f"the larger spike stands {traps['spike_in_noise_stds']:.1f}σ high, while the largest of "
        f"85.8 million noise values is about {traps['largest_noise_in_stds']:.1f}σ" in text
    )
    assert f"that is {chi['one_of_3072_slots']:.3f} against {chi['fixed']:.0f}" in text


def test_largest_batches_and_banded_noise() -> None:
    found, advice = result("claims"), page("docs/advice.md")
    at = found["largest_batches"]
    assert (
        f"stays at {at['1.2']:.2f} with 1,200 at most, and becomes {at['1.1']:.2f} with 1,100"
        in page("docs/training.md")
    )
    rows: dict[str, list[str]] = {}
    for each in found["banded_against_poisson"]:
        said = f"{each['ratio']:.2f}, b = {each['bands']}"
        said = "refused" if each["refused"] else said
        rows.setdefault(each["run"], []).append(f"{said} ({each['pilot']:.2f})")
    assert len(rows) == 4
    for cells in rows.values():
        assert f"| {' | '.join(cells)} |" in advice


def test_units_largest_batches_and_banded_noise_in_accuracy() -> None:
    text = page("docs/advice.md")
    for row in result("mechanisms")["rows"]:
        way = row["way"]
        way += f" (blocks of {row['bands']})" if row["bands"] > 1 else ""
        accuracy = f"{100 * row['mean_accuracy']:.2f} ± {100 * row['standard_error']:.2f}"
        cells = f"| {row['setting']}, {row['epsilon']:g} | {way} | {row['noise_multiplier']:.3g} |"
        assert f"{cells} {accuracy} |" in text
        unit = "unit" if row["setting"] == "digits of units" else "record"
        assert row["epsilon_of"] == unit
        by_groups = way == "records drawn, groups accounted"
        assert row["certified_epsilon_of"] == ("record" if by_groups else unit)
        if row["certified_epsilon_of"] == unit:
            assert row["certified_epsilon"] <= row["epsilon"]


def test_the_readmes_box() -> None:
    rows = {
        (row["claimed_epsilon"], row["batch_clip"]): row["certified_epsilon"]
        for row in result("claims")["certified_at_the_papers_noise"]
    }
    text = page(README)
    assert f"claims 1 for a ViT, {int(rows[1.0, 1.0])} is proven for the noise" in text


def test_real_models_in_words() -> None:
    text, claims = page(AUDITING), page(CLAIMS)
    mini, gpt2 = result("audit_minilm_step_paper"), result("audit_gpt2_step_paper")
    many = result("audit_minilm_4000_one_run_certified")
    made = [audit["setting"]["observations_made"] for audit in (mini, gpt2)]
    caps = [audit["reach"]["largest_possible_bound"]["epsilon"] for audit in (mini, gpt2)]
    assert f"with {made[0]} and {made[1]} releases in each world" in text
    assert f"more than {caps[0]:.2f} and {caps[1]:.2f}" in text
    gaussian = "order-statistics-gaussian"
    aligned = bound(mini, "re-alignment against W_t", "random-direction")[gaussian]
    record = bound(gpt2, "re-alignment against W_t", "scrambled record")[gaussian]
    proven = [verdict(audit, "proven")["claim"]["epsilon"] for audit in (mini, gpt2)]
    assert f"{aligned:.2f} of the {proven[0]:.1f} that are certified for MiniLM" in text
    assert f"the record {record:.2f} of {proven[1]:.1f} for GPT-2" in text
    shown = verdict(many, "proven")["strongest_bound"]
    assert f"4000 gradient canaries, certified for 8, shows {shown:.2f}" in text
    alone = verdict(result("audit_bert_tiny_alone_one_run_paper"), "heuristic")
    assert f"on a small BERT, {alone['strongest_bound']:.2f}." in text
    claimed = [verdict(audit, "heuristic") for audit in (mini, gpt2)]
    for words_before, found in zip(("ε ≥", "shows"), claimed, strict=True):
        epsilon, strongest = found["claim"]["epsilon"], found["strongest_bound"]
        assert f"claimed {epsilon:.3f}, shows" in claims
        assert f"{words_before} {strongest:.2f}" in claims
    assert result("audit_minilm_low_black_box_certified")["largest_paired_difference"] < 7e-5


COMMANDS = {
    path.name: json.loads(path.read_text(encoding="utf-8")).get("command", "")
    for path in (ROOT / "results").glob("audit_*.json")
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_result_has_a_command(name: str) -> None:
    """Those of verbs are parsed, not run; the others name a module or a file that is there.

    The file of settings that a command names holds those of the record.
    """
    import typer

    from shuffled_dpsgd.cli.audit import app

    program, *rest = shlex.split(COMMANDS[name])
    if program == "python":
        place = rest[1].replace(".", "/") + ".py" if rest[0] == "-m" else rest[0]
        assert (ROOT / place).is_file()
        return
    verb, which, *options = rest
    if verb == "reproduce":
        assert which in REPRODUCTIONS
        return
    assert (program, verb) == ("shuffled-dpsgd", "audit")
    group = typer.main.get_command(app)
    found = group.commands[which].make_context(which, options)  # type: ignore[attr-defined]
    if found.params.get("config") is not None:
        now = load_config(ROOT / found.params["config"])
        then = parse_config(result(Path(name).stem)["config"])
        assert (now.task, now.privacy) == (then.task, then.privacy)
        assert (now.training, now.optimizer) == (then.training, then.optimizer)


def test_how_often_checks_find_what_was_planted_and_what_they_take() -> None:
    found = result("checks")
    planted, healthy, cost = found["planted"], found["healthy"], found["cost"]
    assert healthy["false_alarms"] == []
    runs, kinds = planted["runs_of_each"], planted["kinds"]
    small, larger = cost["MLP of 6 inputs"], cost["BERT of 4 layers"]
    sentences = (
        f"Of {runs} runs with each of {kinds} kinds of mixing that it was not written for, "
        f"{planted['found_in_all']:.2%} were stopped before the first release, at least "
        f"{runs - planted['most_missed_of_one_kind']} of each kind.",
        f"In {healthy['steps']:,} steps of {len(healthy['steps_of_each'])} healthy models, in "
        "float32 and bfloat16, none was",
        f"as long as {larger['steps_that_checks_before_the_first_release_take']:.0f} steps of a "
        f"BERT of 4 layers, of {larger['seconds_of_a_step']:.1f} s each.",
        f"Of 10,000 such steps all checks take {larger['share_of_10000_steps_at_most']:.1%} at "
        f"most; of a tiny MLP's, {small['share_of_10000_steps_at_most']:.0%}.",
    )
    for sentence in sentences:
        assert sentence in page("docs/checks.md")
