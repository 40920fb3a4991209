"""The question counterfactual."""
