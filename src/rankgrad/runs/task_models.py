"""From a recipe to its network and what its parameters are trained with."""

import warnings
from typing import Any

import numpy as np
import torch

from rankgrad.data.seeds import bits, derive, permutation
from rankgrad.models import (
    Embedder,
    build_model,
    initialise_head,
    learn_whitening,
    parameter_groups,
)
from rankgrad.runs.data_cache import RunContext, Split
from rankgrad.runs.retrieval_recipe import RetrievalRecipe as Recipe
from rankgrad.runs.retrieval_task import ordered_batches
from rankgrad.train.progress import Progress

# descriptors that learned whitening is computed from: ten for each of 2,048 dimensions
WHITENING_IMAGES = 20_480


def make_model(recipe: Recipe, device: torch.device) -> Embedder:
    """The network of `recipe` with its first weights."""
    model = build_model(recipe.model_spec(), seed=derive(recipe.seed, "first weights")).to(device)
    # in the format it is trained in, since a test that sums in another order would not repeat to the last bit
    return model.to(memory_format=torch.channels_last) if recipe.channels_last else model


def groups_of(recipe: Recipe, model: Embedder) -> list[dict[str, Any]]:
    """Parameter groups with the rates and decays of `recipe`."""
    return parameter_groups(
        model,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        head_lr=recipe.head_lr,
        decay_norms=recipe.decay_norms,
        gem_lr=recipe.gem_lr,
        decay_gem=recipe.decay_gem,
    )


@torch.no_grad()
def whiten(recipe: Recipe, model: Embedder, split: Split, context: RunContext) -> list[str]:
    """Set the linear layer to the learned whitening of training images; returns what there is to say about it."""
    # whole classes in random order, because whitening is learned from images that match
    names, classes = np.unique(split.labels, return_inverse=True)
    order = permutation(len(names), bits(recipe.seed, "whitening"))[classes]
    rows = order.argsort(kind="stable")[:WHITENING_IMAGES]
    if split.rows is not None:
        rows = split.rows[rows]
    batches = ordered_batches(recipe, split, context, rows)
    model.eval()
    pooled = []
    with Progress(len(batches), "whitening", unit="batches") as progress:
        for _, _, images, _ in batches.iterate(0):
            pooled.append(model.pooled(images.to(context.device)).float())
            progress.advance()
    labels = torch.from_numpy(split.table.labels[rows]).to(context.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learned = learn_whitening(torch.cat(pooled), labels)
    initialise_head(model, learned.mean, learned.projection)
    model.train()
    # the outputs of layer norm sum to 0, so one direction is always missing
    wanted = len(learned.mean) - recipe.layer_norm
    return [str(warning.message) for warning in caught] if learned.spanned < wanted else []
