"""What the papers and their errata say about the losses, checked on ours."""

import pytest
from losses import properties as facts
from losses.combinations import OBJECTIVES

import rankgrad

PRESETS = {
    "fastap": rankgrad.FastAPLoss,
    "rambo_recall_log": lambda: rankgrad.RamboRecallLoss(weighting="log"),
    "rambo_recall_loglog": rankgrad.RamboRecallLoss,
    "rambo_ap": lambda: rankgrad.RamboAPLoss(lam=4.0),
    "recall_at_k": rankgrad.RecallAtKLoss,
    "smooth_ap": lambda: rankgrad.SmoothAPLoss(tau=0.05),
}


def exact(objective) -> rankgrad.RankLoss:
    return rankgrad.RankLoss(rankgrad.Exact(), objective)


def log_recall(lam: float) -> rankgrad.RankLoss:
    return rankgrad.RankLoss(rankgrad.Blackbox(lam), rankgrad.LogRecall())


def test_zero_loss_floors_of_recall_at_k():
    facts.check_zero_loss_floors(lambda ks: rankgrad.RecallAtKLoss(ks=ks))


def test_published_convention_of_recall_at_k():
    facts.check_published_convention(
        lambda query_in_database: rankgrad.RecallAtKLoss(tau_rank=1e-4, query_in_database=query_in_database)
    )


def test_fastap_with_ten_bins_has_eleven_centres():
    facts.check_fastap_centres(rankgrad.FastAPLoss)


def test_fastap_gradient_is_the_derivative():
    facts.check_fastap_gradient(lambda bins: rankgrad.FastAPLoss(bins, normalize=False))


def test_fastap_on_ties_is_the_prior():
    facts.check_fastap_all_tied(rankgrad.FastAPLoss)


def test_fastap_with_many_bins_is_near_average_precision():
    facts.check_fastap_many_bins(rankgrad.FastAPLoss)


@pytest.mark.parametrize(
    "make",
    [
        log_recall,
        lambda lam: rankgrad.RamboAPLoss(lam=lam),
        lambda lam: rankgrad.RamboRecallLoss(lam=lam),
        lambda lam: rankgrad.RankLoss(rankgrad.Blackbox(lam), rankgrad.NDCG(), reduction="mean"),
    ],
    ids=["log_recall", "rambo_ap", "rambo_recall", "ndcg"],
)
def test_blackbox_gradients_are_moves_between_two_rankings(make):
    facts.check_blackbox_lists(make)


def test_blackbox_gradient_is_algorithm_1():
    facts.check_blackbox_is_algorithm_1(log_recall)


def test_ties_count_against_an_item():
    facts.check_ties_count_against(exact(rankgrad.ReciprocalRank()))


def test_blackbox_ranks_ties_properly():
    facts.check_blackbox_ties(rankgrad.RankLoss(rankgrad.Blackbox(1.0), rankgrad.AveragePrecision()))


@pytest.mark.parametrize("ranker", [rankgrad.Exact(), rankgrad.Blackbox(1.0), rankgrad.Sigmoid(1e-3)], ids=repr)
def test_a_query_is_not_in_its_own_list(ranker):
    facts.check_query_is_not_in_its_list(rankgrad.RankLoss(ranker, rankgrad.AveragePrecision()))


def test_log_recall_is_a_sum_over_k():
    facts.check_is_weighted_sum_over_k(exact(rankgrad.LogRecall()), facts.log_weight)


def test_loglog_recall_is_a_sum_over_k():
    facts.check_is_weighted_sum_over_k(exact(rankgrad.LogLogRecall()), facts.loglog_weight)


@pytest.mark.parametrize("weights", [(1.0,), (0.5, 0.25, 0.125), tuple(1 / k for k in range(1, 30))], ids=len)
def test_weighted_recall_is_a_sum_over_k(weights):
    facts.check_is_weighted_sum_over_k(
        exact(rankgrad.WeightedRecall(weights)), lambda k: weights[k - 1] if k <= len(weights) else 0.0
    )


@pytest.mark.parametrize("weighting", ["log", "loglog"])
def test_rambo_recall_uses_the_weighting_it_names(weighting):
    weight = {"log": facts.log_weight, "loglog": facts.loglog_weight}[weighting]
    facts.check_is_weighted_sum_over_k(rankgrad.RamboRecallLoss(margin=0.0, weighting=weighting), weight)


@pytest.mark.parametrize("name", PRESETS)
def test_gradient_scales_with_the_loss(name):
    facts.check_scales_with_the_loss(PRESETS[name]())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_sigmoid_tends_to_exact(objective):
    ours, wanted = OBJECTIVES[objective]
    facts.check_tends_to_exact(rankgrad.RankLoss(rankgrad.Sigmoid(1e-4), ours), wanted)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("ranker", [rankgrad.Sigmoid(0.2), rankgrad.Histogram(6)], ids=["sigmoid", "histogram"])
def test_gradient_is_the_derivative(ranker, objective):
    facts.check_gradient_is_the_derivative(rankgrad.RankLoss(ranker, OBJECTIVES[objective][0]))
