"""Programs around a run: they start its roles, or look at models, layouts and results."""
