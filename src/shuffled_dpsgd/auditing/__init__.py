"""Attack the mechanism, and hold every claimed ε against what the attacks show.

estimators/         scores -> lower bounds on ε; no torch
target              what is audited, how much is spent on it, and its budget
run                 audits of real training, built from
    probes, model_attacks, updates   many releases of one step of a run
    canary_run, input_canaries       one run with many canaries
    alignment, taps                  undoing the shuffle; putting canaries into a run
sensitivity, checks replayed neighbours, and how checks are reported
verdict, reach, plots   what was found, how far it reaches, judged and drawn
"""
