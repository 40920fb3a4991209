"""What the theory claims, held against measurements: bounds, Corollary 1, stability, Lipschitz estimates."""
