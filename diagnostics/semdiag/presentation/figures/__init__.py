"""The figures: one a file, each a function from measurements to a matplotlib figure."""

from collections.abc import Callable

from matplotlib.figure import Figure

from semdiag.measurement.measurements import Measurements
from semdiag.presentation.sections.along.along_training import along_training
from semdiag.presentation.sections.bounds.corollary_conditions import corollary_conditions
from semdiag.presentation.sections.bounds.corollary_plane import corollary_plane
from semdiag.presentation.sections.bounds.secants_under_bounds import secants_under_bounds
from semdiag.presentation.sections.convergence.learning_curves import learning_curves
from semdiag.presentation.sections.convergence.speed_up import speed_up
from semdiag.presentation.sections.convergence.speed_up_against_dispersion import speed_up_against_dispersion
from semdiag.presentation.sections.dispersion.dispersion_by_keys import dispersion_by_keys
from semdiag.presentation.sections.dispersion.dispersion_by_layer import dispersion_by_layer
from semdiag.presentation.sections.dispersion.dispersion_ecdf import dispersion_ecdf
from semdiag.presentation.sections.dispersion.dispersion_ratio import dispersion_ratio
from semdiag.presentation.sections.k_sweep.k_sweep import k_sweep
from semdiag.presentation.sections.landscape.landscape_attention import landscape_attention
from semdiag.presentation.sections.landscape.landscape_contour import landscape_contour
from semdiag.presentation.sections.landscape.landscape_cuts import landscape_cuts
from semdiag.presentation.sections.landscape.landscape_surface import landscape_surface
from semdiag.presentation.sections.learning.training_curves import training_curves
from semdiag.presentation.sections.lengths.length_generalisation import length_generalisation
from semdiag.presentation.sections.lipschitz.block_stretch import block_stretch
from semdiag.presentation.sections.lipschitz.lipschitz_percentiles import lipschitz_percentiles
from semdiag.presentation.sections.lipschitz.lipschitz_rungs import lipschitz_rungs
from semdiag.presentation.sections.mask_stability.mask_agreement import mask_agreement
from semdiag.presentation.sections.mask_stability.mask_heat_map import mask_heat_map
from semdiag.presentation.sections.mask_stability.mask_reliability import mask_reliability
from semdiag.presentation.sections.predictors.predictor_cells import predictor_cells
from semdiag.presentation.sections.predictors.predictors import predictors
from semdiag.presentation.sections.separation.key_load import key_load
from semdiag.presentation.sections.separation.separation_by_layer import separation_by_layer
from semdiag.presentation.sections.stability.attention_response import attention_response
from semdiag.presentation.sections.stability.stability_curves import stability_curves
from semdiag.presentation.sections.within.dispersion_counterfactual import dispersion_counterfactual
from semdiag.presentation.sections.within.key_load_counterfactual import key_load_counterfactual
from semdiag.presentation.sections.within.mass_kept import mass_kept
from semdiag.presentation.sections.within.separation_counterfactual import separation_counterfactual

FIGURES: dict[str, Callable[[Measurements], Figure]] = {
    "dispersion_by_layer": dispersion_by_layer,
    "dispersion_ecdf": dispersion_ecdf,
    "dispersion_ratio": dispersion_ratio,
    "dispersion_counterfactual": dispersion_counterfactual,
    "dispersion_by_keys": dispersion_by_keys,
    "mass_kept": mass_kept,
    "separation_by_layer": separation_by_layer,
    "separation_counterfactual": separation_counterfactual,
    "key_load": key_load,
    "key_load_counterfactual": key_load_counterfactual,
    "training_curves": training_curves,
    "stability_curves": stability_curves,
    "attention_response": attention_response,
    "secants_under_bounds": secants_under_bounds,
    "corollary_conditions": corollary_conditions,
    "corollary_plane": corollary_plane,
    "mask_agreement": mask_agreement,
    "mask_reliability": mask_reliability,
    "mask_heat_map": mask_heat_map,
    "k_sweep": k_sweep,
    "lipschitz_percentiles": lipschitz_percentiles,
    "lipschitz_rungs": lipschitz_rungs,
    "block_stretch": block_stretch,
    "landscape_contour": landscape_contour,
    "landscape_surface": landscape_surface,
    "landscape_cuts": landscape_cuts,
    "landscape_attention": landscape_attention,
    "learning_curves": learning_curves,
    "speed_up": speed_up,
    "speed_up_against_dispersion": speed_up_against_dispersion,
    "along_training": along_training,
    "predictors": predictors,
    "predictor_cells": predictor_cells,
    "length_generalisation": length_generalisation,
}

__all__ = [
    # registry
    "FIGURES",
    # figures
    "along_training", "attention_response", "block_stretch", "corollary_conditions", "corollary_plane",
    "dispersion_by_keys",
    "dispersion_by_layer", "dispersion_counterfactual", "dispersion_ecdf", "dispersion_ratio", "k_sweep",
    "key_load", "key_load_counterfactual", "landscape_attention", "landscape_contour", "landscape_cuts",
    "landscape_surface", "lipschitz_percentiles", "lipschitz_rungs", "mask_agreement", "mask_heat_map",
    "mask_reliability", "mass_kept", "secants_under_bounds", "separation_by_layer", "separation_counterfactual",
    "learning_curves", "length_generalisation", "predictor_cells", "predictors", "speed_up",
    "speed_up_against_dispersion", "stability_curves",
    "training_curves",
]  # fmt: skip
