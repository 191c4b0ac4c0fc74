"""Torch maths: the model, its cut into stages, one stage's weights and sums, and the reference for them."""
