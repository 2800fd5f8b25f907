"""What the paper printed in its tables 2 to 8, as data. None of it was measured here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Table 2: (test loss, accuracy in percent), the same with and without shuffling.
INVARIANCE: Mapping[tuple[str, str], tuple[float, float]] = MappingProxyType(
    {
        ("ViT", "non-private"): (0.6362, 89.68),
        ("ViT", "DPSGD"): (1.330, 85.56),
        ("BERT", "non-private"): (0.2302, 92.31),
        ("BERT", "DPSGD"): (1.054, 87.38),
    }
)
WEIGHT_DISTANCE = 1063.02
"""ℓ2 distance of ViT's weights before and after a shuffle."""

METHODS = ("ghost", "mixopt", "shuffled")
EPSILONS = (0.1, 0.5, 1.0)
Scores = tuple[float, tuple[float, ...], tuple[float, ...], tuple[float, ...]]

# Tables 3 to 5: non-private, then ghost, mixopt and shuffled at ε = 0.1, 0.5 and 1.
# Accuracy and BLEU are in percent, METEOR is not.
RESULTS: Mapping[str, Mapping[tuple[str, str, str], Scores]] = MappingProxyType(
    {
        "table3": {
            ("ViT", "CIFAR-100", "accuracy"): (
                89.68, (1.20, 1.26, 67.31), (72.99, 72.98, 75.17), (75.53, 75.55, 75.61),
            ),
        },
        "table4": {
            ("BERT", "SST-2", "accuracy"): (
                92.32, (69.27, 64.56, 87.5), (86.58, 87.38, 88.42), (88.19, 86.93, 88.30),
            ),
            ("BERT", "QQP", "accuracy"): (
                90.49, (69.51, 69.73, 82.14), (80.85, 80.51, 82.25), (83.39, 82.07, 82.26),
            ),
            ("BERT", "MNLI", "accuracy"): (
                83.27, (55.65, 55.58, 73.04), (70.33, 70.12, 73.05), (73.52, 73.25, 73.07),
            ),
            ("BERT", "QNLI", "accuracy"): (
                89.51, (51.29, 59.69, 81.49), (81.03, 81.64, 82.04), (81.77, 81.82, 81.78),
            ),
            ("RoBERTa", "SST-2", "accuracy"): (
                94.95, (87.50, 87.62, 92.32), (90.82, 92.08, 91.63), (91.86, 91.62, 91.51),
            ),
            ("RoBERTa", "QQP", "accuracy"): (
                91.50, (68.19, 68.28, 83.59), (80.67, 80.51, 83.37), (83.39, 83.20, 83.35),
            ),
            ("RoBERTa", "MNLI", "accuracy"): (
                87.49, (55.11, 53.03, 79.29), (78.14, 78.01, 79.21), (79.78, 79.84, 79.38),
            ),
            ("RoBERTa", "QNLI", "accuracy"): (
                93.56, (73.86, 73.86, 85.67), (85.22, 85.92, 85.94), (85.59, 86.14, 85.76),
            ),
        },
        "table5": {
            ("GPT-2", "DART", "BLEU"): (
                62.00, (1.91, 0.92, 38.73), (23.71, 33.51, 40.56), (40.94, 32.49, 42.68),
            ),
            ("GPT-2", "DART", "METEOR"): (
                0.474, (0.005, 0.008, 0.333), (0.298, 0.318, 0.3612), (0.356, 0.341, 0.3859),
            ),
            ("GPT-2", "E2E NLG", "BLEU"): (
                66.75, (0.18, 0.01, 45.93), (35.80, 44.79, 49.77), (53.80, 46.29, 54.93),
            ),
            ("GPT-2", "E2E NLG", "METEOR"): (
                0.4537, (0.0201, 0.0108, 0.3119), (0.2877, 0.3091, 0.3286),
                (0.3328, 0.3174, 0.3436),
            ),
            ("GPT-2-large", "DART", "BLEU"): (
                66.28, (5.74, 4.73, 53.45), (47.28, 46.27, 54.77), (52.36, 52.63, 53.97),
            ),
            ("GPT-2-large", "DART", "METEOR"): (
                0.521, (0.073, 0.045, 0.4570), (0.423, 0.418, 0.4791), (0.449, 0.450, 0.4936),
            ),
            ("GPT-2-large", "E2E NLG", "BLEU"): (
                68.80, (0.21, 0.09, 63.46), (30.97, 33.82, 64.51), (45.42, 45.55, 65.02),
            ),
            ("GPT-2-large", "E2E NLG", "METEOR"): (
                0.4625, (0.0549, 0.0487, 0.3986), (0.2410, 0.2590, 0.4195),
                (0.3180, 0.3231, 0.4276),
            ),
        },
    }
)  # fmt: skip

# Table 6: theoretical ε, audited ε.
AUDIT = ((0.5, 0.4771), (1.0, 0.7005))
# Table 7: milliseconds for a 10,000 × 10,000 matrix on an RTX 3090.
MATRIX_SHUFFLES: Mapping[str, float] = MappingProxyType(
    {"index": 0.9799, "dense matmul": 1316.6, "sparse matmul": 322.62}
)
# Table 8: seconds of an epoch without and with shuffling; RTX 3090, GPT-2-large on an A100.
EPOCH_SECONDS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "ViT, CIFAR": (145, 162),
        "BERT, QNLI": (1708, 1733),
        "RoBERTa, QNLI": (1785, 1811),
        "GPT-2, E2E": (1801, 1813),
        "GPT-2-large, E2E": (2605, 2669),
    }
)
