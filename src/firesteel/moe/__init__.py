"""The mixture-of-experts layer: weights, activations, backends and the float64 oracle."""
