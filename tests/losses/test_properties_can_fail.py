"""The checks of `facts` pass on the oracle and raise on a version of it with one mistake.

Without this a check that compares nothing would look like a check that holds.
"""

import oracle
import pytest
from losses import properties as facts
from losses.mutants import (
    DifferentiablePositiveRank,
    ExclusiveHistogram,
    MeanForgotten,
    OneCentreLess,
    OnlyRelevantMove,
    OwnTermCounted,
    PlainDistance,
    RawLambda,
    RelevantWinTies,
    SelfAsRelevant,
    SharedRanks,
    Standin,
    StrictTies,
    WrongGradient,
    recall_over_all_relevant,
    recall_with_a_temperature_per_k,
)
from oracle import average_precision, log_recall, loglog_recall, recall_at_k, reciprocal_rank

KS = (1, 2, 4, 8, 16)


def rs(ks=KS, tau=0.01, **options) -> Standin:
    return Standin(oracle.Sigmoid(tau), recall_at_k(ks), **options)


def fastap(bins: int, ranker=oracle.Histogram, **options) -> Standin:
    return Standin(ranker(bins), average_precision, **options)


def blackbox(lam: float, ranker=oracle.Blackbox, objective=log_recall) -> Standin:
    return Standin(ranker(lam), objective)


def exact(objective, ranker=oracle.Exact) -> Standin:
    return Standin(ranker(), objective)


def among_all(weight) -> oracle.Objective:
    """The weight of the rank among all items where the irrelevant ones ahead are meant."""
    return lambda e: (e.weight * weight(e.rank - 1)).sum()


def check_log(loss) -> None:
    facts.check_is_weighted_sum_over_k(loss, facts.log_weight)


def check_loglog(loss) -> None:
    facts.check_is_weighted_sum_over_k(loss, facts.loglog_weight)


def check_weighted(loss) -> None:
    facts.check_is_weighted_sum_over_k(loss, lambda k: [0.9, 0.1, 0.4][k - 1] if k <= 3 else 0.0)


def check_limit(loss) -> None:
    facts.check_tends_to_exact(loss, average_precision)


RIGHT = {
    "floors": (facts.check_zero_loss_floors, rs),
    "published": (facts.check_published_convention, lambda inside: rs(tau=1e-4, query_in_database=inside)),
    "centres": (facts.check_fastap_centres, fastap),
    "fastap_gradient": (facts.check_fastap_gradient, lambda bins: fastap(bins, normalize=False)),
    "all_tied": (facts.check_fastap_all_tied, fastap),
    "many_bins": (facts.check_fastap_many_bins, fastap),
    "blackbox_lists": (facts.check_blackbox_lists, blackbox),
    "algorithm_1": (facts.check_blackbox_is_algorithm_1, blackbox),
    "ties": (facts.check_ties_count_against, exact(reciprocal_rank)),
    "blackbox_ties": (facts.check_blackbox_ties, blackbox(1.0, objective=average_precision)),
    "query_removed": (facts.check_query_is_not_in_its_list, exact(average_precision)),
    "log": (check_log, exact(log_recall)),
    "loglog": (check_loglog, exact(loglog_recall)),
    "weighted": (check_weighted, exact(oracle.weighted_recall([0.9, 0.1, 0.4]))),
    "scaling": (facts.check_scales_with_the_loss, fastap(10)),
    "scaling_blackbox": (facts.check_scales_with_the_loss, blackbox(4.0)),
    "limit": (check_limit, Standin(oracle.Sigmoid(1e-4), average_precision)),
    "derivative": (facts.check_gradient_is_the_derivative, rs(tau=0.2)),
    "derivative_histogram": (facts.check_gradient_is_the_derivative, fastap(6)),
}

WRONG = {
    "floors: own term counted": ("floors", lambda ks: Standin(OwnTermCounted(0.01), recall_at_k(ks))),
    "floors: divided by |P|": ("floors", lambda ks: Standin(oracle.Sigmoid(0.01), recall_over_all_relevant(ks))),
    "floors: a temperature per k": (
        "floors", lambda ks: Standin(oracle.Sigmoid(0.01), recall_with_a_temperature_per_k(ks)),
    ),
    "published: the query always removed": ("published", lambda inside: rs(tau=1e-4)),
    "published: the query never removed": ("published", lambda inside: rs(tau=1e-4, query_in_database=True)),
    "published: the query as relevant": (
        "published", lambda inside: (SelfAsRelevant if inside else Standin)(oracle.Sigmoid(1e-4), recall_at_k(KS)),
    ),
    "centres: plain distance": ("centres", lambda bins: fastap(bins, PlainDistance)),
    "centres: ten of them": ("centres", lambda bins: fastap(bins, OneCentreLess)),
    "centres: twelve of them": ("centres", lambda bins: fastap(bins + 1)),
    "fastap gradient: factor 2 missing": (
        "fastap_gradient", lambda bins: WrongGradient(fastap(bins, normalize=False), factor=0.5),
    ),
    "fastap gradient: M/2 times too large": (
        "fastap_gradient", lambda bins: WrongGradient(fastap(bins, normalize=False), factor=5.0),
    ),
    "fastap gradient: incoming one ignored": (
        "fastap_gradient", lambda bins: WrongGradient(fastap(bins, normalize=False), listen=False),
    ),
    "all tied: query in its list": ("all_tied", lambda bins: fastap(bins, query_in_database=True)),
    "all tied: query as relevant": ("all_tied", lambda bins: SelfAsRelevant(oracle.Histogram(bins), average_precision)),
    "many bins: exclusive counts": ("many_bins", lambda bins: fastap(bins, ExclusiveHistogram)),
    "many bins: exact": ("many_bins", lambda bins: exact(average_precision)),
    "blackbox lists: irrelevant items do not move": ("blackbox_lists", lambda lam: blackbox(lam, OnlyRelevantMove)),
    "blackbox lists: another step": ("blackbox_lists", lambda lam: WrongGradient(blackbox(lam), factor=0.37)),
    "blackbox lists: no gradient": ("blackbox_lists", lambda lam: WrongGradient(blackbox(lam), factor=0.0)),
    "algorithm 1: lambda without n": ("algorithm_1", lambda lam: blackbox(lam, RawLambda)),
    "algorithm 1: 1/Q not in the perturbation": ("algorithm_1", lambda lam: blackbox(lam, MeanForgotten)),
    "algorithm 1: gradient through positive_rank": (
        "algorithm_1", lambda lam: blackbox(lam, DifferentiablePositiveRank),
    ),
    "ties: strict": ("ties", exact(reciprocal_rank, StrictTies)),
    "ties: half": ("ties", Standin(oracle.Sigmoid(1e-4), reciprocal_rank)),
    "blackbox ties: relevant first": ("blackbox_ties", blackbox(1.0, RelevantWinTies, average_precision)),
    "blackbox ties: not a permutation": ("blackbox_ties", exact(average_precision, SharedRanks)),
    "query removed: kept": ("query_removed", Standin(oracle.Exact(), average_precision, query_in_database=True)),
    "query removed: found": ("query_removed", SelfAsRelevant(oracle.Exact(), average_precision)),
    "log: weights 1/K": ("log", exact(oracle.weighted_recall([1 / k for k in range(1, 18)]))),
    "log: rank among all": ("log", exact(among_all(lambda r: (1 + r).log()))),
    "log: loglog": ("log", exact(loglog_recall)),
    "loglog: log": ("loglog", exact(log_recall)),
    "weighted: shifted by one": ("weighted", exact(oracle.weighted_recall([0.0, 0.9, 0.1, 0.4]))),
    "weighted: goes on past the last": ("weighted", exact(oracle.weighted_recall([0.9, 0.1, 0.4, 0.4]))),
    "scaling: incoming gradient ignored": ("scaling", WrongGradient(fastap(10), listen=False)),
    "scaling: no gradient": ("scaling", WrongGradient(fastap(10), factor=0.0)),
    "scaling of blackbox: incoming gradient ignored": ("scaling_blackbox", WrongGradient(blackbox(4.0), listen=False)),
    "limit: off by a half": ("limit", Standin(OwnTermCounted(1e-4), average_precision)),
    "limit: not small enough": ("limit", Standin(oracle.Sigmoid(0.05), average_precision)),
    "derivative: a factor": ("derivative", WrongGradient(rs(tau=0.2), factor=2.0)),
    "derivative: blackbox": ("derivative", blackbox(4.0)),
    "derivative of the histogram: a factor": ("derivative_histogram", WrongGradient(fastap(6), factor=2.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_check_passes_on_the_oracle(name):
    check, subject = RIGHT[name]
    check(subject)


@pytest.mark.parametrize("name", WRONG)
def test_check_raises_on_a_mistake(name):
    fact, subject = WRONG[name]
    with pytest.raises(AssertionError):
        RIGHT[fact][0](subject)


def test_every_check_has_a_mistake_it_finds():
    assert {fact for fact, _ in WRONG.values()} == set(RIGHT)
    tested = {check for check, _ in RIGHT.values()} | {facts.check_is_weighted_sum_over_k, facts.check_tends_to_exact}
    assert tested >= {value for name, value in vars(facts).items() if name.startswith("check_")}
