"""What a step of a recipe costs on this machine."""

from dataclasses import replace

import torch
from torch import Tensor

from rankgrad.runs.data_cache import DataCache, RunContext
from rankgrad.runs.retrieval_recipe import RetrievalRecipe as Recipe
from rankgrad.runs.retrieval_task import make_batches
from rankgrad.runs.step_cost import plan
from rankgrad.runs.task_losses import make_loss
from rankgrad.runs.task_models import groups_of, make_model

# images of a class where a sampler takes whole classes and no data says how many: SOP's mean
ASSUMED_PER_CLASS = 5


def plan_recipe(recipe: Recipe, context: RunContext) -> str:
    """A table of stages, times and memory; with data the batches are real ones and an epoch's time is told too."""
    steps_per_epoch = 0
    if context.data is not None or recipe.data_set == "glyphs":
        data = DataCache(context)
        split, _ = data.training(recipe)
        batches = make_batches(recipe, split, context)
        steps_per_epoch = len(batches)

        def make_batch() -> tuple[Tensor, Tensor]:
            _, _, images, labels = next(batches.iterate(0))
            return images, labels
    else:
        if not recipe.batch_size:
            raise ValueError(f"{recipe.name}: the size of a batch depends on the data: give --data DIR or --batch-size N")

        def make_batch() -> tuple[Tensor, Tensor]:
            # one image in many places: time and memory do not depend on what is seen
            image = torch.randint(0, 256, (1, 3, recipe.size, recipe.size), dtype=torch.uint8)
            labels = torch.arange(recipe.batch_size) // (recipe.per_class or ASSUMED_PER_CLASS)
            return image.expand(recipe.batch_size, -1, -1, -1), labels

    # neither do they depend on the weights, so nothing is downloaded
    model = make_model(replace(recipe, weights="none"), context.device)
    found = plan(
        model,
        make_loss(recipe),
        make_batch,
        recipe.train_settings(parallel=context.parallel),
        context.device,
        groups=groups_of(recipe, model),
        steps_per_epoch=steps_per_epoch,
    )
    return f"{recipe.name}: {recipe.what}\n{found}"
