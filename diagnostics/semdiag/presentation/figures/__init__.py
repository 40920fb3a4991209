"""The figures: one a file, each a function from measurements to a matplotlib figure."""

from collections.abc import Callable

from matplotlib.figure import Figure

from semdiag.measurement.measurements import Measurements
from semdiag.presentation.figures.along_training import along_training
from semdiag.presentation.figures.attention_response import attention_response
from semdiag.presentation.figures.block_stretch import block_stretch
from semdiag.presentation.figures.corollary_conditions import corollary_conditions
from semdiag.presentation.figures.corollary_plane import corollary_plane
from semdiag.presentation.figures.dispersion_by_keys import dispersion_by_keys
from semdiag.presentation.figures.dispersion_by_layer import dispersion_by_layer
from semdiag.presentation.figures.dispersion_counterfactual import dispersion_counterfactual
from semdiag.presentation.figures.dispersion_ecdf import dispersion_ecdf
from semdiag.presentation.figures.dispersion_ratio import dispersion_ratio
from semdiag.presentation.figures.k_sweep import k_sweep
from semdiag.presentation.figures.key_load import key_load
from semdiag.presentation.figures.key_load_counterfactual import key_load_counterfactual
from semdiag.presentation.figures.landscape_attention import landscape_attention
from semdiag.presentation.figures.landscape_contour import landscape_contour
from semdiag.presentation.figures.landscape_cuts import landscape_cuts
from semdiag.presentation.figures.landscape_surface import landscape_surface
from semdiag.presentation.figures.learning_curves import learning_curves
from semdiag.presentation.figures.length_generalisation import length_generalisation
from semdiag.presentation.figures.lipschitz_percentiles import lipschitz_percentiles
from semdiag.presentation.figures.lipschitz_rungs import lipschitz_rungs
from semdiag.presentation.figures.mask_agreement import mask_agreement
from semdiag.presentation.figures.mask_heat_map import mask_heat_map
from semdiag.presentation.figures.mask_reliability import mask_reliability
from semdiag.presentation.figures.mass_kept import mass_kept
from semdiag.presentation.figures.predictor_cells import predictor_cells
from semdiag.presentation.figures.predictors import predictors
from semdiag.presentation.figures.secants_under_bounds import secants_under_bounds
from semdiag.presentation.figures.separation_by_layer import separation_by_layer
from semdiag.presentation.figures.separation_counterfactual import separation_counterfactual
from semdiag.presentation.figures.speed_up import speed_up
from semdiag.presentation.figures.speed_up_against_dispersion import speed_up_against_dispersion
from semdiag.presentation.figures.stability_curves import stability_curves
from semdiag.presentation.figures.training_curves import training_curves

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
