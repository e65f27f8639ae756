"""From a recipe to its loss."""

import rankgrad as rg
from rankgrad.runs.retrieval_recipe import RetrievalRecipe as Recipe


def make_loss(recipe: Recipe) -> rg.RankLoss | rg.SiMix | rg.EmbeddingMemory:
    """The loss that `recipe` names, with its parameters, SiMix or memory around it."""
    loss = _ranked(recipe)
    if recipe.simix:
        # randomness comes from torch's own state, which the training loop sets before every step
        return rg.SiMix(loss)
    if recipe.memory:
        return rg.EmbeddingMemory(loss, recipe.memory)
    return loss


def _ranked(recipe: Recipe) -> rg.RankLoss:
    match recipe.loss:
        case "fastap":
            return rg.FastAPLoss(recipe.bins)
        case "rambo-recall":
            return rg.RamboRecallLoss(recipe.lam, recipe.margin, recipe.weighting)
        case "rambo-ap":
            return rg.RamboAPLoss(recipe.lam, recipe.margin)
        case "smooth-ap":
            return rg.SmoothAPLoss(recipe.tau)
        case "recall-at-k":
            return rg.RecallAtKLoss(recipe.ks, recipe.tau, recipe.tau_cut, query_in_database=recipe.query_in_database)
        case _:
            raise AssertionError(f"no loss for {recipe.loss!r}")
