import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency

from semdiag_files import InputError
from semdiag_models.config import ListOpsTrees
from semdiag_models.listops import TreeWriter
from semdiag_models.tasks import TASKS, listops_task

TASK = TASKS["listops"]
LAW = TreeWriter(ListOpsTrees(), np.random.default_rng(0))
N = 6_000
MIN, MAX, MED, SM, CLOSER, PAD = range(10, 16)

# Of 20 000 trees from the source's generator.
SOURCE_LABELS = [3143, 1875, 1553, 1688, 1814, 1762, 1622, 1451, 1837, 3255]
SOURCE_LABEL_GIVEN_ROOT = {  # percent
    MIN: [52.9, 22.6, 11.0, 6.5, 3.3, 1.7, 1.1, 0.4, 0.4, 0.2],
    MAX: [0.1, 0.5, 0.6, 1.2, 1.7, 3.5, 6.4, 10.9, 22.3, 52.8],
    MED: [1.1, 4.3, 10.0, 16.7, 21.6, 19.8, 14.6, 8.0, 3.2, 0.8],
    SM: [10.0] * 10,
}


@pytest.fixture(scope="module")
def samples():
    return TASK.sample(N, 599, torch.Generator().manual_seed(0))


def depths(tokens):
    """Depth of operator nesting at each token."""
    return ((tokens >= MIN) & (tokens < CLOSER)).long().cumsum(1) - (tokens == CLOSER).long().cumsum(1)


@pytest.mark.slow
def test_lengths_have_their_exact_law(samples, assert_law):
    lengths = (samples[0] != PAD).sum(1)
    law = LAW.length_laws[1][501:]
    assert_law(Counter(lengths.tolist()), dict(enumerate(law / law.sum(), start=501)))


def test_the_law_of_the_lengths_is_that_measured_on_the_source():
    law = LAW.length_laws[1][501:]
    law /= law.sum()
    lengths = np.arange(501, 600)
    mean = law @ lengths
    standard_error = (law @ (lengths - mean) ** 2 / 20_000) ** 0.5
    assert abs(mean - 549.2) < 4.5 * standard_error + 0.05
    assert law[0] == pytest.approx(0.0106, abs=0.0035)
    assert law[-1] == pytest.approx(0.0095, abs=0.0035)


@pytest.mark.slow
def test_labels_have_the_shares_of_the_source(samples):
    counts = samples[1].bincount(minlength=10).tolist()
    assert chi2_contingency([counts, SOURCE_LABELS]).pvalue > 1e-5


def test_root_operators_are_uniform(samples, assert_law):
    assert_law(Counter(samples[0][:, 0].tolist()), dict.fromkeys((MIN, MAX, MED, SM), 0.25))


@pytest.mark.parametrize("root", SOURCE_LABEL_GIVEN_ROOT)
def test_labels_given_the_root_have_the_shares_of_the_source(samples, root):
    tokens, labels = samples
    there = labels[tokens[:, 0] == root]
    for label, percent in enumerate(SOURCE_LABEL_GIVEN_ROOT[root]):
        share = percent / 100
        margin = 4.5 * math.sqrt(share * (1 - share) * (1 / len(there) + 1 / 5000)) + 0.0005
        assert abs((there == label).double().mean().item() - share) < margin


def test_the_first_token_alone_reaches_the_shortcut(samples, assert_share):
    tokens, labels = samples
    guess = torch.tensor([0, 9, 4, 0])[tokens[:, 0] - MIN]
    assert_share((guess == labels).double().mean(), TASK.shortcut[0], N)


def test_tokens_have_the_shares_of_the_source(samples):
    tokens = samples[0]
    shares = tokens[tokens != PAD].bincount(minlength=15).double()
    shares /= shares.sum()
    assert shares[:10].tolist() == pytest.approx([0.0714] * 10, abs=5e-4)
    assert shares[MIN:CLOSER].tolist() == pytest.approx([0.0358] * 4, abs=3e-4)
    assert shares[CLOSER].item() == pytest.approx(0.143, abs=6e-4)
    assert (tokens == PAD).double().mean().item() == pytest.approx(0.083, abs=2e-3)


def test_trees_are_nested_as_deep_as_in_the_source(samples):
    nesting = depths(samples[0]).amax(1)
    assert nesting.max() == 9
    assert (nesting == 9).double().mean() > 0.999


def test_all_samples_are_different(samples):
    assert len({tuple(row) for row in samples[0].tolist()}) == N


def test_padding_is_on_the_right_up_to_the_asked_length():
    tokens, _ = TASK.sample(20, 700, torch.Generator().manual_seed(0))
    assert tokens.shape == (20, 700)
    for row in tokens.tolist():
        length = row.index(PAD)
        assert 501 <= length <= 599
        assert set(row[length:]) == {PAD}


def test_a_variant_keeps_to_its_lengths_depth_and_arities(label_of):
    task = listops_task(ListOpsTrees(shortest=50, longest=100, max_depth=5, min_arity=3, max_arity=6))
    tokens, labels = task.sample(1000, 100, torch.Generator().manual_seed(0))
    lengths = (tokens != PAD).sum(1)
    assert lengths.min() >= 50
    assert lengths.max() <= 100
    assert depths(tokens).max() == 4
    rows = [[token for token in row if token != PAD] for row in tokens.tolist()]
    assert [label_of(task, row) for row in rows] == labels.tolist()
    for row in rows:
        counts = []
        for token in row:
            counts = [*counts[:-1], counts[-1] + 1] if counts and token != CLOSER else counts
            if token in (MIN, MAX, MED, SM):
                counts.append(0)
            elif token == CLOSER:
                assert 3 <= counts.pop() <= 6


def test_duplicates_are_dropped_until_every_string_has_come():
    task = listops_task(ListOpsTrees(shortest=4, longest=4, max_depth=2))
    tokens, _ = task.sample(400, 4, torch.Generator().manual_seed(0))
    everything = {(o, a, b, CLOSER) for o in (MIN, MAX, MED, SM) for a in range(10) for b in range(10)}
    assert {tuple(row) for row in tokens.tolist()} == everything


def test_more_samples_than_there_are_strings_are_refused():
    task = listops_task(ListOpsTrees(shortest=4, longest=4, max_depth=2))
    with pytest.raises(
        InputError, match=r"^listops with 4 to 4 tokens.* gave 400 different strings only, not n=401\.$"
    ):
        task.sample(401, 4, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"shortest": 20, "longest": 10}, "needs 1 ≤ shortest ≤ longest. Got 20 and 10."),
        ({"shortest": 0, "longest": 10}, "needs 1 ≤ shortest ≤ longest. Got 0 and 10."),
        ({"min_arity": 0}, "needs 1 ≤ min_arity ≤ max_arity. Got 0 and 10."),
        ({"min_arity": 5, "max_arity": 4}, "needs 1 ≤ min_arity ≤ max_arity. Got 5 and 4."),
        ({"max_depth": 0}, "max_depth must lie in [1, 1000000000]. Got max_depth=0."),
    ],
)
def test_impossible_parameters_are_refused(parameters, message):
    with pytest.raises(InputError) as refusal:
        ListOpsTrees(**parameters)
    assert str(refusal.value).removeprefix("listops ") == message


@pytest.mark.parametrize("parameters", [(2, 3), (501, 599, 2), (5, 9, 1)])
def test_parameters_that_leave_no_string_are_refused(parameters):
    task = listops_task(ListOpsTrees(*parameters))
    with pytest.raises(InputError, match="has no string"):
        task.sample(1, 600, torch.Generator().manual_seed(0))
