"""Attack the mechanism, and hold every claimed ε against what the attacks show.

    estimators/         scores -> lower bounds on ε; no torch
    canaries            what is planted on one axis; adversaries: what reads it, under which threat
    step, composition   one step, or a whole run, in isolation: no model
    worst_case          the theorem's own worst-case pair
    paper_audit         the paper's Table 6, and what it was able to see
    paper_training      the same inside real training, with a strong audit beside it
    black_box           membership attacks with the shuffle and without: the knock-out
    run                 audits of real training, built from
        probes, model_attacks          many releases of one step of a run
        one_run_training, *_canaries   one run with many canaries
        alignment, matching            undoing the shuffle by linear assignment
    sensitivity, sampling              replayed neighbours, and tests of the sampler
    ranges                             what a setting refuses
    verdict, reach, plots              what was found, how far it reaches, judged and drawn

Nothing is imported here: `audit step` needs neither torch nor a model.
"""
