"""Attack the mechanism, and hold every claimed ε against what the attacks show.

    estimators/         scores -> lower bounds on ε; no torch
    canaries            what is planted on one axis; adversaries: what reads it, under which threat
    step, composition   one step, or a whole run, in isolation: no model
    worst_case          the theorem's own worst-case pair
    run                 audits of real training, built from
        probes, model_attacks          many releases of one step of a run
        one_run_training, *_canaries   one run with many canaries
        alignment, matching            undoing the shuffle by linear assignment
    sensitivity, sampling              replayed neighbours, and tests of the sampler
    ranges                             what a setting refuses
    verdict, reach, plots              what was found, how far it reaches, judged and drawn

Nothing is imported here: `audit step` needs neither torch nor a model.
"""
